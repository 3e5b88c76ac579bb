"""Keys of a configuration, and what they are if they are not given, under the names of DeepSpeed's constants.

``GRADIENT_CLIPPING`` is the key, ``GRADIENT_CLIPPING_DEFAULT`` the value. Defaults are DeepSpeed's: zoo's own, which
``zoo.deepspeed.initialize`` takes for what a document does not say, are on the page of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WITH_DEFAULTS: dict[str, dict[str, Any]] = {
    # Keys of the root, each named like its constant.
    "": {
        "communication_data_type": None, "dataloader_drop_last": False, "disable_allgather": False,
        "disable_python_gc": False, "dump_state": False, "gradient_accumulation_steps": None,
        "gradient_allreduce_op": "mean", "gradient_clipping": 1.0, "gradient_predivide_factor": 1.0,
        "log_level": None, "managed_gradient_accumulation": True, "memory_breakdown": False,
        "prescale_gradients": False, "seq_parallel_communication_data_type": "fp32", "steps_per_print": None,
        "train_batch_size": None, "train_micro_batch_size_per_gpu": None, "vocabulary_size": None,
        "wall_clock_breakdown": False, "zero_allow_untested_optimizer": False, "zero_force_ds_cpu_optimizer": True,
        "grad_accum_dtype": None, "param_dtype": None, "buffer_dtype": None, "keep_in_fp32_modules": "auto",
        "legacy_fusion": False,
    },
    # Keys of sections: the section, then the key.
    "FP16_": {
        "auto_cast": False, "consecutive_hysteresis": False, "enabled": False, "hysteresis": 2,
        "initial_scale_power": 16, "loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": 1,
    },
    "BFLOAT16_": {"enabled": False, "immediate_grad_update": True},
    "TORCH_AUTOCAST_": {"enabled": False},
    "CHECKPOINT_": {"tag_validation": "WARN"},
}  # fmt: skip
"""What the names of constants begin with → key → default; a constant is named like its key."""

_MORE: dict[str, Any] = {
    "BFLOAT16": "bf16", "BFLOAT16_OLD": "bfloat16", "BFLOAT16_CHECK_OVERFLOW_DEFAULT": False,
    "BFLOAT16_MASTER_WEIGHTS_AND_GRADS": "bf16_master_weights_and_grads",
    "BFLOAT16_MASTER_WEIGHTS_AND_GRADS_DEFAULT": False, "BFLOAT16_OPTIMIZER_STATES": "bf16_optimizer_states",
    "BFLOAT16_OPTIMIZER_STATES_DEFAULT": False, "CHECK_OVERFLOW": "check_overflow",
    "CHECKPOINT": "checkpoint", "CHECKPOINT_TAG_VALIDATION_MODES": ["WARN", "IGNORE", "FAIL"],
    "DATA_PARALLEL_GROUP": "data_parallel_group", "DATA_TYPES": "data_types", "DDP_BFLOAT16": "ddp_bf16",
    "FP16": "fp16", "FP16_MASTER_WEIGHTS_AND_GRADS": "fp16_master_weights_and_grads",
    "FP16_MASTER_WEIGHTS_AND_GRADS_DEFAULT": False, "GLOBAL_RANK": "global_rank",
    "GRADIENT_ALLREDUCE_OP_MEAN": "mean", "GRADIENT_ALLREDUCE_OP_SUM": "sum",
    "GRADIENT_ALLREDUCE_OP_SUPPORTED": ("mean", "sum"), "LOAD_UNIVERSAL_CHECKPOINT": "load_universal",
    "LOAD_UNIVERSAL_CHECKPOINT_DEFAULT": False, "MAX_GRAD_NORM": "max_grad_norm", "OPTIMIZER": "optimizer",
    "OPTIMIZER_PARAMS": "params", "OPTIMIZER_TYPE_DEFAULT": None, "PIPE_REPLICATED": "ds_pipe_replicated",
    "ROUTE_ENCODE": "encode", "ROUTE_EVAL": "eval", "ROUTE_PREDICT": "predict", "ROUTE_TRAIN": "train",
    "SCHEDULER": "scheduler", "SCHEDULER_PARAMS": "params", "SCHEDULER_TYPE_DEFAULT": None,
    "TORCH_AUTOCAST": "torch_autocast", "TORCH_AUTOCAST_DTYPE": "dtype",
    "TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES": "lower_precision_safe_modules", "TYPE": "type",
    "USE_DATA_BEFORE_EXPERT_PARALLEL": "use_data_before_expert_parallelism",
    "USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT": False,
    "USE_NODE_LOCAL_STORAGE_CHECKPOINT": "use_node_local_storage", "USE_NODE_LOCAL_STORAGE_CHECKPOINT_DEFAULT": False,
}  # fmt: skip

_TYPES = ("adagrad", "adam", "adamw", "lamb", "lion", "muon")

OPTIMIZERS: Mapping[str, Any] = {
    **{f"{kind.upper()}_OPTIMIZER": kind for kind in _TYPES},
    "DEEPSPEED_OPTIMIZERS": list(_TYPES), "TORCH_ADAM_PARAM": "torch_adam", "ADAM_W_MODE": "adam_w_mode",
    "ADAM_W_MODE_DEFAULT": True,
}  # fmt: skip
"""Types of optimizers, and options of Adam's section."""

CONSTANTS: Mapping[str, Any] = {
    name: value
    for prefix, keys in _WITH_DEFAULTS.items()
    for key, default in keys.items()
    for name, value in ((prefix + key.upper(), key), (f"{prefix}{key.upper()}_DEFAULT", default))
} | _MORE
"""Every constant and its value."""


class ValidationMode:
    """What is done about checkpoint tags that ranks spell differently."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


def __getattr__(name: str) -> Any:
    for table in (CONSTANTS, OPTIMIZERS):
        if name in table:
            return table[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
