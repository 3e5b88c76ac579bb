"""Mixtures of experts: Mixtral, and Qwen's with a shared expert (2) or norms of heads (3).

Jiang et al. 2024 (arXiv:2401.04088). Every rank has all experts, and some of the hidden features of each; routers are
whole, and choose from the same bits on all ranks.
"""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import attention, counts, experts, has_experts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan


def plan(config: Any) -> Plan:
    """Of the model with its head."""
    at, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    norms = ("q_norm", "k_norm") if config.model_type == "qwen3_moe" else ()
    routed = [has_experts(config, layer) for layer in range(config.num_hidden_layers)]
    places = [mlp] if not all(routed) else []
    places += [f"{mlp}.shared_expert"] if any(routed) and config.model_type == "qwen2_moe" else []
    return Plan(
        name=config.model_type,
        sizes=sizes(config, config.num_key_value_heads),
        rules=(
            *vocabulary("model.embed_tokens"),
            *attention(at, "q_proj", "k_proj", "v_proj", "o_proj", norms=norms),
            *((experts(f"{mlp}.experts"),) if any(routed) else ()),
            *(
                r
                for place in places
                for r in perceptron(f"{place}.gate_proj", f"{place}.up_proj", down=f"{place}.down_proj")
            ),
        ),
        counts=counts(at, {"num_key_value_groups": "query"}),
        layers="model.layers.*",
    )
