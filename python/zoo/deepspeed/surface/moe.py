"""Mixtures of experts."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Table

_EXPERTS = "zoo.deepspeed.adapters.moe.experts"
_GATING = "zoo.deepspeed.adapters.moe.gating"
_ROUTED = "zoo.deepspeed.adapters.moe.routed_experts"

_MOE = Name(
    f"{_EXPERTS}:MoE",
    "zoo.moe.MoE: any k; the capacity is never above the number of tokens; consecutive ranks share the experts.",
)
_KEPT = "the groups that are given stay as they are; each group of experts has the parameters of one given group."

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
}  # fmt: skip
