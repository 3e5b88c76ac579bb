"""GPT-Neo: three matrices, and windows in every other layer. Black et al. 2021 (doi:10.5281/zenodo.5297715)."""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import attention, counts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan


def plan(config: Any) -> Plan:
    """Of the model with its head."""
    at, mlp = "transformer.h.*.attn.attention", "transformer.h.*.mlp"
    return Plan(
        name=config.model_type,
        sizes=sizes(config),
        rules=(
            *vocabulary("transformer.wte"),
            *attention(at, "q_proj", "k_proj", "v_proj", "out_proj"),
            *perceptron(f"{mlp}.c_fc", down=f"{mlp}.c_proj"),
        ),
        counts=counts(at, {"num_heads": "head"}),
        layers="transformer.h.*",
    )
