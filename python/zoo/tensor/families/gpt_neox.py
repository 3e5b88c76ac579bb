"""GPT-NeoX and Pythia: query, key and value of each head together. Black et al. 2022 (arXiv:2204.06745)."""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan, Rule


def plan(config: Any) -> Plan:
    """Of the model with its head. Its attention counts no heads: it asks for their features alone."""
    at, mlp = "gpt_neox.layers.*.attention", "gpt_neox.layers.*.mlp"
    return Plan(
        name=config.model_type,
        sizes=sizes(config),
        rules=(
            *vocabulary("gpt_neox.embed_in"),
            Rule(module=f"{at}.query_key_value", rows="head part=3 dim", cut="head"),
            Rule(module=f"{at}.dense", columns="head dim", cut="head"),
            *perceptron(f"{mlp}.dense_h_to_4h", down=f"{mlp}.dense_4h_to_h"),
        ),
        layers="gpt_neox.layers.*",
    )
