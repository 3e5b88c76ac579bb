"""Attention inside a transformer layer, forward and backward, on q, k and v side by side.

    S = q kᵀ / √D + mask    P = softmax(S)    P' = dropout(P)    O = P' v
    dv = P'ᵀ dO    dP = dropout(dO vᵀ)    dS = P·(dP - Σ dP·P)    dq = dS k / √D    dk = dSᵀ q / √D

Vaswani et al. 2017, section 3.2. Legend: B sequences, T tokens, C hidden size, H heads, D = C/H. qkv (B, T, 3·C); mask
broadcasts to (B, H, T, T); P (B, H, T, T). The mask of dropout is a function of an element's place in P.

On a CPU one sequence is done after the other: its P stays in the cache from the product that makes it to the one that
uses it, and no head is copied to where its numbers follow each other. Elsewhere all are done at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zoo.kernels.bias_dropout_residual import dropout
from zoo.kernels.softmax import softmax, softmax_backward
from zoo.nn.transformer.saved import Kept

Tensor = torch.Tensor


@dataclass(frozen=True)
class Attention:
    """What a call of attention is told: H, and the probability, seed and offset of dropout."""

    heads: int
    p: float
    seed: int
    offset: int

    def dropped(self, t: Tensor, rows: slice) -> Tensor:
        """Dropout of the sequences ``rows`` of what is like P."""
        if self.p == 0:
            return t
        return dropout(t, p=self.p, seed=self.seed, offset=self.offset, first=rows.start * math.prod(t.shape[1:]))

    def heads_of(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k, v (B, H, T, D), views."""
        batch, tokens, width = qkv.shape
        parts = qkv.view(batch, tokens, 3, self.heads, width // (3 * self.heads)).permute(2, 0, 3, 1, 4)
        return parts[0], parts[1], parts[2]

    def forward(self, qkv: Tensor, mask: Tensor | None, kept: Kept, *, keep: bool) -> Tensor:
        """O, (B, T, C); P is told to ``kept`` if ``keep``."""
        q, k, v = self.heads_of(qkv)
        batch, heads, tokens, size = q.shape
        context = qkv.new_empty(batch, tokens, heads * size)
        by_head = context.view(batch, tokens, heads, size).transpose(1, 2)
        stored = qkv.new_empty(batch, heads, tokens, tokens) if keep else None
        for rows in _blocks(qkv):
            p = _probabilities(q[rows], k[rows], _part(mask, rows, batch))
            if stored is not None:
                stored[rows] = p
            by_head[rows] = self.dropped(p, rows) @ v[rows]
        if stored is not None:
            kept.keep(probabilities=stored)
        return context

    def backward(self, grad: Tensor, qkv: Tensor, mask: Tensor | None, probabilities: Tensor | None) -> Tensor:
        """d qkv from dO; P is made again where it is None."""
        q, k, v = self.heads_of(qkv)
        batch, heads, tokens, size = q.shape
        out = torch.empty_like(qkv)
        dq, dk, dv = self.heads_of(out)
        by_head = grad.view(batch, tokens, heads, size).transpose(1, 2)
        scale = 1.0 / math.sqrt(size)
        for rows in _blocks(qkv):
            if probabilities is None:
                p = _probabilities(q[rows], k[rows], _part(mask, rows, batch))
            else:
                p = probabilities[rows]
            dv[rows] = self.dropped(p, rows).mT @ by_head[rows]
            dp = self.dropped(by_head[rows] @ v[rows].mT, rows)
            ds = softmax_backward(dp, p, scale=scale)
            dq[rows] = ds @ k[rows]
            dk[rows] = ds.mT @ q[rows]
        return out


def _blocks(qkv: Tensor) -> Iterator[slice]:
    batch = qkv.shape[0]
    size = 1 if qkv.device.type == "cpu" else max(batch, 1)
    return (slice(first, first + size) for first in range(0, batch, size))


def _part(mask: Tensor | None, rows: slice, batch: int) -> Tensor | None:
    return None if mask is None else mask.expand(batch, -1, -1, -1)[rows]


def _probabilities(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    return softmax(q @ k.mT, scale=1.0 / math.sqrt(q.shape[-1]), mask=mask)
