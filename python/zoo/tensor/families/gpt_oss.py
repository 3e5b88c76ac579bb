"""GPT-OSS: experts with biases, gate and up by turns, and a sink for each head, which takes part in its softmax.

OpenAI 2025 (arXiv:2508.10925), section 2.
"""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import attention, counts, sizes, vocabulary
from zoo.tensor.plans import Plan, Rule


def plan(config: Any) -> Plan:
    """Of the model with its head. Biases of the experts' outputs are added by one rank."""
    at, experts = "model.layers.*.self_attn", "model.layers.*.mlp.experts"
    inside = (
        ("gate_up_proj", -1, "inner part=2"),
        ("gate_up_proj_bias", -1, "inner part=2"),
        ("down_proj", -2, "inner"),
    )
    return Plan(
        name=config.model_type,
        sizes=sizes(config, config.num_key_value_heads),
        rules=(
            *vocabulary("model.embed_tokens"),
            Rule(module=at, own=(("sinks", 0, "head"),), cut="head"),
            *attention(at, "q_proj", "k_proj", "v_proj", "o_proj"),
            Rule(module=experts, inside=inside, once=("down_proj_bias",), cut="inner"),
        ),
        counts=counts(at, {"num_key_value_groups": "query"}),
        layers="model.layers.*",
    )
