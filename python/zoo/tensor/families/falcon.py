"""Falcon in its three layouts: one key and value for all queries (7B), one for each query (RW), one for a group (40B).

Almazrouei et al. 2023 (arXiv:2311.16867).
"""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import counts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan, Rule, Take


def plan(config: Any) -> Plan:
    """Of the model with its head. Slopes of heads come as (batch, heads, 1, T), and are added to the mask before."""
    at, mlp = "transformer.h.*.self_attention", "transformer.h.*.mlp"
    kv, rows, cut = config.num_attention_heads, "head part=3 dim", "head"
    if config.new_decoder_architecture:
        kv, rows, cut = config.num_kv_heads, "kv (query one=1 one=1) dim", "kv"
    elif config.multi_query:
        kv, rows = 1, "(head kv kv) dim"
    slopes = ("alibi", "attention_mask") if config.alibi else ()
    return Plan(
        name=config.model_type,
        sizes=sizes(config, kv),
        rules=(
            *vocabulary("transformer.word_embeddings"),
            Rule(module=f"{at}.query_key_value", rows=rows, cut=cut),
            Rule(module=f"{at}.dense", columns="head dim", cut="head"),
            *perceptron(f"{mlp}.dense_h_to_4h", down=f"{mlp}.dense_4h_to_h"),
        ),
        counts=counts(at, {"num_heads": "head", "num_kv_heads": "kv"}),
        takes=tuple(Take(module=at, argument=name, dim=1, dims="head") for name in slopes),
        layers="transformer.h.*",
    )
