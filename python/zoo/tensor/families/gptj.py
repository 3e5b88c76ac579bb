"""GPT-J: attention and perceptron read one norm side by side; the head has a bias.

Wang and Komatsuzaki 2021, "GPT-J-6B".
"""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import attention, counts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan


def plan(config: Any) -> Plan:
    """Of the model with its head."""
    at, mlp = "transformer.h.*.attn", "transformer.h.*.mlp"
    return Plan(
        name=config.model_type,
        sizes=sizes(config),
        rules=(
            *vocabulary("transformer.wte"),
            *attention(at, "q_proj", "k_proj", "v_proj", "out_proj"),
            *perceptron(f"{mlp}.fc_in", down=f"{mlp}.fc_out"),
        ),
        counts=counts(at, {"num_attention_heads": "head"}),
        layers="transformer.h.*",
    )
