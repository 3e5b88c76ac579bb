"""BERT: three matrices with biases; the bias of the head is tied to the head's own. Devlin et al. 2019
(arXiv:1810.04805)."""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import attention, counts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan


def plan(config: Any) -> Plan:
    """Of the model with its head for words. The pooler and the head's first matrix stay whole."""
    layer = "bert.encoder.layer.*"
    places = [f"{layer}.attention"] + [f"{layer}.crossattention"] * bool(getattr(config, "add_cross_attention", False))
    names = ("self.query", "self.key", "self.value", "output.dense")
    own = {"num_attention_heads": "head", "all_head_size": "head dim"}
    return Plan(
        name=config.model_type,
        sizes=sizes(config, dim=config.hidden_size // config.num_attention_heads),
        rules=(
            *vocabulary("bert.embeddings.word_embeddings", head="cls.predictions.decoder"),
            *(rule for at in places for rule in attention(at, *names)),
            *perceptron(f"{layer}.intermediate.dense", down=f"{layer}.output.dense"),
        ),
        counts=tuple(count for at in places for count in counts(f"{at}.self", own)),
        layers=layer,
    )
