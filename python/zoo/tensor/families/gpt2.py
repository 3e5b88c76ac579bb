"""GPT-2: all queries, then all keys, then all values in one matrix, stored as (in, out).

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import counts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan, Rule


def plan(config: Any) -> Plan:
    """Of the model with its head. Attention to an encoder has its queries apart, then all keys, then all values."""
    at, mlp = "transformer.h.*.attn", "transformer.h.*.mlp"
    other, own = "transformer.h.*.crossattention", {"num_heads": "head", "split_size": "head dim"}
    crosses = bool(getattr(config, "add_cross_attention", False))
    cross = (
        Rule(module=f"{other}.q_attn", rows="head dim", cut="head"),
        Rule(module=f"{other}.c_attn", rows="part=2 head dim", cut="head"),
        Rule(module=f"{other}.c_proj", columns="head dim", cut="head"),
    )
    return Plan(
        name=config.model_type,
        sizes=sizes(config, dim=config.hidden_size // config.num_attention_heads),
        rules=(
            *vocabulary("transformer.wte"),
            Rule(module=f"{at}.c_attn", rows="part=3 head dim", cut="head"),
            Rule(module=f"{at}.c_proj", columns="head dim", cut="head"),
            *(cross if crosses else ()),
            *perceptron(f"{mlp}.c_fc", down=f"{mlp}.c_proj"),
        ),
        counts=(*counts(at, own), *(counts(other, own) if crosses else ())),
        layers="transformer.h.*",
    )
