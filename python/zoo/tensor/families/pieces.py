"""What families have in common: vocabularies, attention with three matrices, perceptrons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.tensor.plans import Count, Rule

Rules = tuple[Rule, ...]


def vocabulary(*embeddings: str, head: str = "lm_head") -> Rules:
    """The words of embeddings are dealt, and those of the head, whose outputs are gathered; tied or not."""
    return (
        *(Rule(module=name, rows="vocab", cut="vocab") for name in embeddings),
        Rule(module=head, rows="vocab", cut="vocab", gather=True),
    )


def attention(module: str, q: str, k: str, v: str, out: str, *, norms: Sequence[str] = ()) -> Rules:
    """Three matrices of heads, and the one that mixes heads; ``norms``: of the features of each head."""
    return (
        Rule(module=f"{module}.{q}", rows="head dim", cut="head"),
        Rule(module=f"{module}.{k}", rows="kv dim", cut="kv"),
        Rule(module=f"{module}.{v}", rows="kv dim", cut="kv"),
        *(Rule(module=f"{module}.{norm}", partial=True) for norm in norms),
        Rule(module=f"{module}.{out}", columns="head dim", cut="head"),
    )


def perceptron(*up: str, down: str) -> Rules:
    """Hidden features are dealt: rows of the matrices ``up``, columns of ``down``."""
    rows = tuple(Rule(module=name, rows="inner", cut="inner") for name in up)
    return (*rows, Rule(module=down, columns="inner", cut="inner"))


def counts(module: str, attributes: Mapping[str, str]) -> tuple[Count, ...]:
    """``{"num_heads": "head"}``: attributes of one module, and what each of them counts."""
    return tuple(Count(module=module, attribute=name, dims=dims) for name, dims in attributes.items())


def sizes(config: Any, kv: int | None = None, **more: int) -> tuple[tuple[str, int], ...]:
    """Of heads, of heads of keys and values, of the vocabulary, and ``more``."""
    heads: int = config.num_attention_heads
    return (("head", heads), ("kv", kv or heads), ("vocab", config.vocab_size), *more.items())


def experts(module: str) -> Rule:
    """Experts whose matrices are one tensor each, gate and up together: (E, 2I, C) and (E, C, I)."""
    return Rule(module=module, inside=(("gate_up_proj", -2, "part=2 inner"), ("down_proj", -1, "inner")), cut="inner")


def has_experts(config: Any, layer: int) -> bool:
    """Whether a layer has experts, by what configurations say of it; True where they say nothing."""
    dense = getattr(config, "mlp_only_layers", None) or ()
    step = getattr(config, "decoder_sparse_step", None) or 1
    first = getattr(config, "first_k_dense_replace", None) or 0
    return layer >= first and layer not in dense and (layer + 1) % step == 0
