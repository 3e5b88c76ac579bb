"""Keys in the files of DeepSpeed's checkpoints, and what the names of files begin and end with, as constants."""

from __future__ import annotations

from typing import Any

_KEYS = (
    "base_optimizer_state", "base_optimizer_state_step", "buffer_names", "cat_dim", "clip_grad", "ds_version",
    "fp32_flat_groups", "fp32_groups", "frozen_param_fragments", "frozen_param_shapes", "group_paddings",
    "loss_scaler", "optimizer_state_dict", "original_vocab_size", "padded_vocab_size", "param",
    "param_alignment_paddings", "param_groups", "param_n_sub_params", "param_shapes", "param_slice_mappings",
    "parameter_to_average_patterns", "parameter_with_2_sub_params_cat_dim_0",
    "parameter_with_row_parallelism_patterns", "parameter_with_sub_params", "partition_count",
    "pipeline_replicated_parameter_patterns", "single_partition_of_fp32_groups", "sub_param_shape",
    "sub_param_shard_widths", "sub_params_shape", "tp_replicated_parameter_patterns", "universal_checkpoint_info",
    "vocab_tensor", "vocabulary_parameter_patterns", "zero_stage",
)  # fmt: skip
"""Keys whose constant is the key in capitals."""

CONSTANTS: dict[str, Any] = {
    **{key.upper(): key for key in _KEYS},
    "CHECKPOINT_PARALLEL_DIMS": "checkpoint_parallel_dimensions", "CHECKPOINT_PP_DEGREE": "pp_degree",
    "CHECKPOINT_TP_DEGREE": "tp_degree", "EP_IS_EXPERT_PARAM": "is_expert_param", "EP_NUM_EXPERTS": "ep_num_experts",
    "EXPERT_PARAMETER_PATTERNS": "expert_parameter_patterns", "FP32_WEIGHT_KEY": "fp32",
    "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version", "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4,
    "BF16_ZERO_FILE_PREFIX": "bf16_zero_pp_rank_", "FP16_ZERO_FILE_PREFIX": "fp16_zero_pp_rank_",
    "LAYER_FILE_PREFIX": "layer_", "MODEL_FILE_PREFIX": "mp_rank_", "MODEL_FILE_SUFFIX": "_model_states.pt",
    "OPTIM_FILE_SUFFIX": "_optim_states.pt", "ZERO_FILE_PREFIX": "zero_pp_rank_",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in CONSTANTS:
        return CONSTANTS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
