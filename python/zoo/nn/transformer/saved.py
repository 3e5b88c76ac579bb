"""What a transformer layer keeps for backward: the rows of a table, of which options drop some.

Legend: B sequences, T tokens of each, C hidden size, H heads, I inner size. A *unit* is B·T·C numbers of the dtype.

Not in the table, because they are never kept: the masks of dropout, and what they were applied to, which are functions
of (seed, place); normalised values without ``normalize_invertible``, which one sweep makes again.

With the defaults, dropout or not, the units are 1 + 3 + H·T/C + 1 + 1 + 2·I/C, and with post-norm 1 more: 17 for BERT
(T = 128, H = 12, C = 768, I = 4·C), where torch keeps 30 and Hugging Face 24. With all options 11, of which the last
is the output, which the next layer keeps anyhow as its input: a stack of such layers has 10 a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zoo.nn.transformer.config import TransformerLayerConfig as Config

Tensor = torch.Tensor


@dataclass(frozen=True)
class Saved:
    """A row: one tensor.

    Args:
        name: of the tensor.
        width: numbers for each token, from the configuration and T.
        kept: whether it is, under a configuration.
        again: how the backward makes it where it needs it and it is not kept.
        statistic: fp32 whatever the dtype (fp64 where that is fp64).
    """

    name: str
    width: Callable[[Config, int], int]
    kept: Callable[[Config], bool]
    again: str = ""
    statistic: bool = False


def _hidden(config: Config, tokens: int) -> int:
    return config.hidden_size


def _inner(config: Config, tokens: int) -> int:
    return config.inner_size


def _one(config: Config, tokens: int) -> int:
    return 1


def _always(config: Config) -> bool:
    return True


TABLE: tuple[Saved, ...] = (
    Saved("input", _hidden, lambda c: not (c.pre_layer_norm and c.normalize_invertible), "from input_normed"),
    Saved("input_normed", _hidden, lambda c: c.pre_layer_norm and c.normalize_invertible, "normalise input"),
    Saved("qkv", lambda c, tokens: 3 * c.hidden_size, _always),
    Saved(
        "probabilities", lambda c, tokens: c.heads * tokens, lambda c: not c.attn_dropout_checkpoint,
        "softmax of q·kᵀ, from qkv",
    ),
    Saved("context", _hidden, _always),
    Saved("attn_sum", _hidden, lambda c: not c.normalize_invertible, "from attn_normed"),
    Saved("attn_normed", _hidden, lambda c: c.normalize_invertible, "normalise attn_sum"),
    Saved("intermediate", _inner, _always),
    Saved("activated", _inner, lambda c: not c.gelu_checkpoint, "GELU of intermediate"),
    Saved("output_sum", _hidden, lambda c: not (c.pre_layer_norm or c.normalize_invertible), "from output"),
    Saved("output", _hidden, lambda c: c.normalize_invertible and not c.pre_layer_norm),
    Saved("attn_mean", _one, _always, statistic=True),
    Saved("attn_rstd", _one, _always, statistic=True),
    Saved("norm_mean", _one, _always, statistic=True),
    Saved("norm_rstd", _one, _always, statistic=True),
)  # fmt: skip
"""Tensors in the order in which the forward makes them; ``norm_*`` are of the first normalisation (pre-norm), or of
the last. A row is kept, or made again, or (``output_sum`` and ``output`` of pre-norm) not needed."""


def kept_rows(config: Config) -> tuple[Saved, ...]:
    """The rows that are kept under a configuration."""
    return tuple(row for row in TABLE if row.kept(config))


def saved_bytes(config: Config, batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that one call keeps for backward, parameters and the mask apart."""
    size, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    return sum(
        batch * tokens * row.width(config, tokens) * (wide if row.statistic else size) for row in kept_rows(config)
    )


class Kept(dict[str, Tensor]):
    """Name → tensor, of the rows that are kept; all else that it is told goes."""

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.names = names

    def keep(self, **tensors: Tensor) -> None:
        """Remember those of them that are to be kept."""
        self.update({name: tensor for name, tensor in tensors.items() if name in self.names})
