"""DistilBERT: BERT's matrices under other names. Sanh et al. 2019 (arXiv:1910.01108)."""

from __future__ import annotations

from typing import Any

from zoo.tensor.families.pieces import attention, counts, perceptron, sizes, vocabulary
from zoo.tensor.plans import Plan


def plan(config: Any) -> Plan:
    """Of the model with its head for masked words."""
    layer = "distilbert.transformer.layer.*"
    at = f"{layer}.attention"
    return Plan(
        name=config.model_type,
        sizes=sizes(config, dim=config.hidden_size // config.num_attention_heads),
        rules=(
            *vocabulary("distilbert.embeddings.word_embeddings", head="vocab_projector"),
            *attention(at, "q_lin", "k_lin", "v_lin", "out_lin"),
            *perceptron(f"{layer}.ffn.lin1", down=f"{layer}.ffn.lin2"),
        ),
        counts=counts(at, {"n_heads": "head", "dim": "head dim"}),
        layers=layer,
    )
