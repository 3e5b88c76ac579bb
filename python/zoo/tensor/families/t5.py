"""T5 and FLAN-T5: an encoder, a decoder that looks at it, and biases of relative positions, a column for each head.

Raffel et al. 2020 (arXiv:1910.10683), section 2.1.
"""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import attention, counts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan, Rule


def plan(config: Any) -> Plan:
    """Of the model with its head. The first block of each stack has the biases, and the others get them from it."""
    own = {"n_heads": "head", "inner_dim": "head dim"}
    places = (("encoder", "0.SelfAttention", 1), ("decoder", "0.SelfAttention", 2), ("decoder", "1.EncDecAttention", 2))
    at = [f"{stack}.block.*.layer.{name}" for stack, name, _ in places]
    biases = [f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias" for stack in ("encoder", "decoder")]
    mlps = [f"{stack}.block.*.layer.{last}.DenseReluDense" for stack, _, last in places[:2]]
    up = ("wi_0", "wi_1") if config.is_gated_act else ("wi",)
    return Plan(
        name=config.model_type,
        sizes=sizes(config, dim=config.d_kv),
        rules=(
            *vocabulary("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
            *(rule for module in at for rule in attention(module, "q", "k", "v", "o")),
            *(Rule(module=module, columns="head", cut="head") for module in biases),
            *(rule for mlp in mlps for rule in perceptron(*(f"{mlp}.{u}" for u in up), down=f"{mlp}.wo")),
        ),
        counts=tuple(count for module in at for count in counts(module, own)),
        layers="encoder.block.*",
    )
