"""The baseline: what the previous byte alone tells about the next one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zoo.examples.byte_lm.model import NUM_BYTES


class Bigram:
    """P(b | a) = (n(a, b) + 1) / (n(a) + 256), counted on training text (add-one smoothing).

    Args:
        data: (N,) uint8.
        ranges: [start, stop) of the pieces to count; pairs across pieces are not counted.
    """

    def __init__(self, data: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        counts = torch.zeros(NUM_BYTES * NUM_BYTES, dtype=torch.float64)
        for start, stop in ranges:
            piece = data[start:stop].long()
            counts += torch.bincount(piece[:-1] * NUM_BYTES + piece[1:], minlength=NUM_BYTES * NUM_BYTES)
        counts = counts.view(NUM_BYTES, NUM_BYTES) + 1.0
        self.log_probability = (counts / counts.sum(dim=1, keepdim=True)).log()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Mean of -ln P(y | x) over all elements, in nats a byte."""
        return float(-self.log_probability[x.flatten(), y.flatten()].mean())
