"""BERT: three matrices with biases; the bias of the head is tied to the head's own. Devlin et al. 2019
(arXiv:1810.04805)."""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import alone, attention, counts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan


def plan(config: Any) -> Plan:
    """Of the model with its head for masked words. The pooler and the head's first matrix stay whole."""
    alone(config)
    layer = "bert.encoder.layer.*"
    at = f"{layer}.attention"
    own = {"num_attention_heads": "head", "all_head_size": "head dim"}
    return Plan(
        name=config.model_type,
        sizes=sizes(config, dim=config.hidden_size // config.num_attention_heads),
        rules=(
            *vocabulary("bert.embeddings.word_embeddings", head="cls.predictions.decoder"),
            *attention(at, "self.query", "self.key", "self.value", "output.dense"),
            *perceptron(f"{layer}.intermediate.dense", down=f"{layer}.output.dense"),
        ),
        counts=counts(f"{at}.self", own),
        layers=layer,
    )
