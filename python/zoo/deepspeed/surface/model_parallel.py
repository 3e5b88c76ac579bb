"""Mixtures of experts; tensor parallelism: ``tp_model_init``, AutoTP's layers and descriptions, the section."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Table

_EXPERTS = "zoo.deepspeed.adapters.moe.experts"
_GATING = "zoo.deepspeed.adapters.moe.gating"
_ROUTED = "zoo.deepspeed.adapters.moe.routed_experts"

_MOE = Name(
    f"{_EXPERTS}:MoE",
    "zoo.moe.MoE: any k; the capacity is never above the number of tokens; consecutive ranks share the experts.",
)
_KEPT = "the groups that are given stay as they are; each group of experts has the parameters of one given group."

_TENSOR = "zoo.deepspeed.adapters.tensor"
_INIT = Name(
    f"{_TENSOR}.training:tp_model_init", "it counts for the model that it is given, and not for others made later."
)
_MODE = Name(f"{_TENSOR}.training:set_autotp_mode", "nothing but is_autotp_training_mode() depends on it.")
_CONFIG = Name(
    f"{_TENSOR}.specs:AutoTPConfig",
    "unknown keys are an error; embeddings that match are cut along their entries, so that their outputs are whole.",
)
_PLANNED = "the model is cut by a zoo.tensor plan: heads stay whole, tied matrices are cut together."
_SPECS: Names = {
    "AutoTPConfig": _CONFIG,
    "AutoTPPresets": f"{_TENSOR}.specs:AutoTPPresets",
    "PartitionType": f"{_TENSOR}.specs:PartitionType",
    "TPLayerSpec": f"{_TENSOR}.specs:TPLayerSpec",
    "merge_autotp_configs": f"{_TENSOR}.specs:merge_autotp_configs",
}
_PARTS = "a torch.nn.Linear whose parameters say which part they are; parts that are given are refused."
_LAYERS: Names = {
    name: Name(f"{_TENSOR}.layers:{name}", _PARTS)
    for name in (
        "GateUpPack_LinearLayer", "LinearAllreduce", "LinearLayer", "LmHeadLinearAllreduce", "SubParamLinearAllreduce",
        "SubParamLinearLayer", "TensorParallel_Layer",
    )
}  # fmt: skip
_SECTION: Names = {"get_tensor_parallel_config": f"{_TENSOR}.sections:get_tensor_parallel_config"}
_MANAGER = Name(f"{_TENSOR}.sections:TpTrainingManager", _PLANNED)

TABLE: Table = {
    "moe": {},
    "moe.layer": {"MoE": _MOE},
    "moe.sharded_moe": {
        "top1gating": Name(f"{_GATING}:top1gating", "fewer tokens than min_capacity are no error."),
        "top2gating": Name(f"{_GATING}:top2gating", "the logits that are given stay as they are."),
        "topkgating": f"{_GATING}:topkgating",
        "gumbel_rsample": f"{_GATING}:gumbel_rsample",
        "multiplicative_jitter": f"{_GATING}:multiplicative_jitter",
        "TopKGate": f"{_GATING}:TopKGate",
        "TUTEL_INSTALLED": f"{_GATING}:TUTEL_INSTALLED",
        "dist": "zoo.deepspeed.comm",
    },
    "moe.utils": {
        "has_moe_layers": f"{_EXPERTS}:has_moe_layers",
        "is_moe_param": f"{_EXPERTS}:is_moe_param",
        "is_moe_param_group": f"{_EXPERTS}:is_moe_param_group",
        "configure_moe_param_groups": Name(f"{_EXPERTS}:configure_moe_param_groups", _KEPT),
        "split_params_into_shared_and_expert_params": f"{_EXPERTS}:split_params_into_shared_and_expert_params",
        "split_params_grads_into_shared_and_expert_params": (
            f"{_EXPERTS}:split_params_grads_into_shared_and_expert_params"
        ),
        "split_params_into_different_moe_groups_for_optimizer": Name(
            f"{_EXPERTS}:split_params_into_different_moe_groups_for_optimizer", _KEPT
        ),
    },
    "moe.ep_count": {"count_tokens_per_expert": f"{_ROUTED}:count_tokens_per_expert"},
    "moe.ep_router": {
        "TokenChoiceTopKRouter": Name(f"{_ROUTED}:TokenChoiceTopKRouter", "wrong groups are refused when it is made."),
        "count_tokens_per_expert": f"{_ROUTED}:count_tokens_per_expert",
    },
    "moe.ep_experts": {
        "GroupedExperts": Name(
            f"{_ROUTED}:GroupedExperts", "one product for all experts, whatever use_grouped_mm and gate_up_impl say."
        )
    },
    "moe.ep_kernels": {
        name: f"{_ROUTED}:{name}"
        for name in (
            "TOKEN_GROUP_ALIGN_SIZE_M", "generate_permute_indices", "inverse_permutation", "permute_rows",
            "permute_rows_supported", "unpermute_rows",
        )
    },
    "moe.ep_repack": {"repack_expert_weights": f"{_ROUTED}:repack_expert_weights"},
    "": {"tp_model_init": _INIT, "set_autotp_mode": _MODE},
    "module_inject": {
        **_SPECS,
        **{name: _LAYERS[name] for name in _LAYERS if name.startswith(("LinearA", "LinearL", "SubParam"))},
        "set_autotp_mode": _MODE,
    },
    "module_inject.autotp_config": _SPECS,
    "module_inject.auto_tp": {
        **{name: _SPECS[name] for name in ("AutoTPConfig", "PartitionType", "TPLayerSpec")},
        "AutoTP": Name(f"{_TENSOR}.auto_tp:AutoTP", _PLANNED),
    },
    "module_inject.layers": {
        **_LAYERS,
        "set_autotp_mode": _MODE,
        "get_auto_tp_mode": f"{_TENSOR}.training:get_auto_tp_mode",
        "is_autotp_training_mode": f"{_TENSOR}.training:is_autotp_training_mode",
    },
    "module_inject.tp_plan_converter": {
        "TPPlanConverter": Name(f"{_TENSOR}.specs:TPPlanConverter", "the engine reads all styles, without it."),
    },
    "module_inject.tp_shard": {
        name: f"{_TENSOR}.auto_tp:{name}"
        for name in (
            "get_n_embd", "get_num_attention_heads", "get_num_kv_heads", "get_shard_size", "get_shard_size_list",
            "set_n_embd", "set_num_attention_heads", "set_num_kv_heads", "set_tp_grain_size",
        )
    },
    "runtime.tensor_parallel": {**_SECTION, "TpTrainingManager": _MANAGER},
    "runtime.tensor_parallel.config": {
        **_SECTION,
        "TPTrainingConfig": f"{_TENSOR}.sections:TPTrainingConfig",
        "_get_hf_tp_plan": f"{_TENSOR}.training:get_hf_tp_plan",
    },
    "runtime.tensor_parallel.tp_manager": {"TpTrainingManager": _MANAGER},
}  # fmt: skip
