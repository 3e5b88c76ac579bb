"""BLOOM: query, key and value of each head together, and slopes of heads (ALiBi, Press et al. 2022, arXiv:2108.12409).

Le Scao et al. 2022 (arXiv:2211.05100).
"""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import counts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan, Rule, Take


def plan(config: Any) -> Plan:
    """Of the model with its head. The slopes come as (batch · heads, 1, T)."""
    if config.slow_but_exact and config.pretraining_tp > 1:
        raise ValueError(
            f"slow_but_exact with pretraining_tp={config.pretraining_tp}: such a BLOOM multiplies slices of whole "
            "matrices by itself. Set slow_but_exact to false."
        )
    at, mlp = "transformer.h.*.self_attention", "transformer.h.*.mlp"
    return Plan(
        name=config.model_type,
        sizes=sizes(config),
        rules=(
            *vocabulary("transformer.word_embeddings"),
            Rule(module=f"{at}.query_key_value", rows="head part=3 dim", cut="head"),
            Rule(module=f"{at}.dense", columns="head dim", cut="head"),
            *perceptron(f"{mlp}.dense_h_to_4h", down=f"{mlp}.dense_4h_to_h"),
        ),
        counts=counts(at, {"num_heads": "head"}),
        takes=(Take(module=at, argument="alibi", dim=0, dims="batch head"),),
        layers="transformer.h.*",
    )
