"""DeepSeek-V3: heads made of latents that every rank has, experts, and a shared expert.

DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1. Latents and their norms are whole; the matrices that make heads of
them are dealt by heads. One rotary key is read by all heads.
"""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import counts, experts, has_experts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan, Rule


def plan(config: Any) -> Plan:
    """Of the model with its head."""
    at, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    queries = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    latents = {name: getattr(config, name) for name in ("kv_lora_rank", "qk_rope_head_dim")}
    routed = [has_experts(config, layer) for layer in range(config.num_hidden_layers)]
    places = ([mlp] if not all(routed) else []) + ([f"{mlp}.shared_experts"] if any(routed) else [])
    return Plan(
        name=config.model_type,
        sizes=sizes(config, **latents),
        rules=(
            *vocabulary("model.embed_tokens"),
            Rule(module=f"{at}.{queries}", rows="head dim", cut="head"),
            Rule(module=f"{at}.kv_a_proj_with_mqa", outputs="(kv_lora_rank qk_rope_head_dim)", cut="qk_rope_head_dim"),
            Rule(module=f"{at}.kv_b_proj", rows="head dim", cut="head"),
            Rule(module=f"{at}.o_proj", columns="head dim", cut="head"),
            *((experts(f"{mlp}.experts"),) if any(routed) else ()),
            *(
                r
                for place in places
                for r in perceptron(f"{place}.gate_proj", f"{place}.up_proj", down=f"{place}.down_proj")
            ),
        ),
        counts=counts(at, {"num_heads": "head"}),
        layers="model.layers.*",
    )
