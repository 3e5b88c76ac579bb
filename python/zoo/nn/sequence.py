"""Attention over a sequence that is split over ranks: Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.

Legend: B batch, S whole sequence, P ranks that share it, H query heads, K key and value heads, D head size.

Rank r holds tokens [r S/P, (r+1) S/P) everywhere in the model but inside of attention, where it holds all tokens of
heads [r H/P, (r+1) H/P):

    q, k, v (B, S/P, H, D) → all-to-all → (B, S, H/P, D) → attention → (B, S, H/P, D) → all-to-all → (B, S/P, H, D)

A rank sends (P-1)/P of its q, k, v and output in forward and as much in backward: 4 (P-1)/P · B S/P H D elements each
(K = H), which falls with P as its tokens do. Only attention mixes tokens, so nothing else in the model changes, except
that positions (rotary or learned) are those in the whole sequence: they begin at r S/P.

**Gradients.** All P ranks hold the same parameters, and each the part of their gradient that its tokens give. Take as
the ZeRO group the *combined* group of data-parallel and sequence-parallel ranks (``sequence_data_parallel_group``
elsewhere). With Q replicas of P ranks each, and L_r the mean over rank r's own tokens, its mean over all PQ ranks is
the gradient of 1/(PQ) Σ L_r, the mean over all tokens. Where ranks count different numbers of tokens n_r (padding,
ignored labels), rank r's loss is to be multiplied by n_r PQ / Σ n, or the mean is one of means. Optimizer states are
then split PQ ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.comm import Communicator, exchange

Attention = Callable[..., torch.Tensor]

_SEQUENCE, _HEADS = 1, 2


def dot_product_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """softmax(q kᵀ · scale) v by ``F.scaled_dot_product_attention``, q (B, S, H, D), k and v (B, S, K, D).

    Query head h looks at key and value head h // (H/K). ``scale`` is D^-1/2 by default.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


class SequenceParallelAttention(nn.Module):
    """Any attention, for sequences split over the ranks of a group.

    Args:
        attention: ``attention(q, k, v, *args, **kwargs)`` on whole sequences and a part of the heads: q (B, S, H/P, D),
            k and v (B, S, K/P, D) → (B, S, H/P, ·), such as :func:`dot_product_attention`. May be a module; one with
            parameters by head has to know which heads are its own.
        group: process group, one axis of a ``DeviceMesh``, or a :class:`~zoo.comm.Communicator`, of the P ranks that
            share a sequence, in the order of its pieces. None for the default group.
        check: agree on a fingerprint before every all-to-all, for debugging.

    forward takes q (B, S/P, H, D), k and v (B, S/P, K, D), equally long on all ranks, and returns (B, S/P, H, ·).
    Further arguments go to ``attention`` as they are: a mask is that of the whole sequence, a bias by head that of the
    rank's own heads. With grouped queries (K < H) each rank keeps whole groups. All ranks must go through backward if
    one does.

    Raises:
        ValueError: P does not divide H or K, K does not divide H, or shapes do not fit together.
    """

    def __init__(self, attention: Attention = dot_product_attention, group: Any = None, *, check: bool = False) -> None:
        super().__init__()
        self.attention = attention
        self.comm = group if isinstance(group, Communicator) else Communicator(group, check=check)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attention of this rank's queries to the whole sequence. Collective over the group."""
        self._check(q, k, v)
        q, k, v = exchange(
            (q, k, v), self.comm, split_dim=_HEADS, join_dim=_SEQUENCE, label="queries, keys and values by head"
        )
        out = self.attention(q, k, v, *args, **kwargs)
        if out.shape[:3] != q.shape[:3]:
            raise ValueError(
                f"the attention returned a tensor of shape {tuple(out.shape)} for queries {tuple(q.shape)} (batch, "
                "sequence, heads, head size); the first three must stay."
            )
        (out,) = exchange((out,), self.comm, split_dim=_SEQUENCE, join_dim=_HEADS, label="attention by sequence")
        return out

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3] or q.shape[:2] != k.shape[:2]:
            raise ValueError(
                f"SequenceParallelAttention got {shapes}; it takes q (B, S/P, H, D), k and v (B, S/P, K, D) of one "
                "batch and one piece of the sequence."
            )
        heads, groups, size = q.shape[_HEADS], k.shape[_HEADS], self.comm.size
        if groups == 0 or heads % groups:
            raise ValueError(f"{heads} query heads on {groups} key and value heads ({shapes}); K must divide H.")
        if heads % size or groups % size:
            raise ValueError(
                f"{heads} query heads and {groups} key and value heads over {size} sequence-parallel ranks: "
                f"{size} must divide both. Use a smaller group, or repeat the keys and values "
                "(repeat_interleave along dim 2) until it does."
            )
