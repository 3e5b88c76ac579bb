"""Llama and the models that differ from it in what a plan does not see (biases, windows, caps), or in norms of heads.

Touvron et al. 2023 (arXiv:2302.13971); Mistral, Qwen 2 and 3, Gemma 1, 2 and 3 name and lay out their matrices alike.
"""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import attention, counts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan

_NORMS_OF_HEADS = frozenset({"gemma3_text", "qwen3"})
"""Queries and keys are normalised head by head."""


def plan(config: Any) -> Plan:
    """Of the model with its head."""
    at, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    norms = ("q_norm", "k_norm") if config.model_type in _NORMS_OF_HEADS else ()
    return Plan(
        name=config.model_type,
        sizes=sizes(config, config.num_key_value_heads),
        rules=(
            *vocabulary("model.embed_tokens"),
            *attention(at, "q_proj", "k_proj", "v_proj", "o_proj", norms=norms),
            *perceptron(f"{mlp}.gate_proj", f"{mlp}.up_proj", down=f"{mlp}.down_proj"),
        ),
        counts=counts(at, {"num_key_value_groups": "query"}),
        layers="model.layers.*",
    )
