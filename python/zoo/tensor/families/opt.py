"""OPT: three matrices with biases. Zhang et al. 2022 (arXiv:2205.01068)."""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import attention, counts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan


def plan(config: Any) -> Plan:
    """Of the model with its head."""
    layer = "model.decoder.layers.*"
    at = f"{layer}.self_attn"
    return Plan(
        name=config.model_type,
        sizes=sizes(config),
        rules=(
            *vocabulary("model.decoder.embed_tokens"),
            *attention(at, "q_proj", "k_proj", "v_proj", "out_proj"),
            *perceptron(f"{layer}.fc1", down=f"{layer}.fc2"),
        ),
        counts=counts(at, {"num_heads": "head"}),
        layers=layer,
    )
