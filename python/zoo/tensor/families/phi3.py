"""Phi-3: queries, keys and values are one matrix, one after the other; so are the perceptron's two.

Abdin et al. 2024 (arXiv:2404.14219).
"""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import counts, sizes, vocabulary
from zoo.tensor.plans import Plan, Rule


def plan(config: Any) -> Plan:
    """Of the model with its head."""
    at, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    heads = {"config.num_attention_heads": "head", "num_key_value_heads": "kv", "num_key_value_groups": "query"}
    return Plan(
        name=config.model_type,
        sizes=sizes(config, config.num_key_value_heads),
        rules=(
            *vocabulary("model.embed_tokens"),
            Rule(module=f"{at}.qkv_proj", rows="(head kv kv) dim", cut="head"),
            Rule(module=f"{at}.o_proj", columns="head dim", cut="head"),
            Rule(module=f"{mlp}.gate_up_proj", rows="part=2 inner", cut="inner"),
            Rule(module=f"{mlp}.down_proj", columns="inner", cut="inner"),
        ),
        counts=counts(at, heads),
        layers="model.layers.*",
    )
