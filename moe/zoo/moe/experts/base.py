"""What runs on rows that are sorted by expert."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from zoo.layout import declare_split

Tensor = torch.Tensor

AXIS = "expert"
"""The mesh axis along which ranks have other experts."""


class Experts(nn.Module):
    """Experts first, …, first + num_local - 1 of num_experts; this rank has these.

    Attributes:
        num_experts: of the layer, on all ranks. num_local: here. first: the number of the first one here.
    """

    def __init__(self, num_experts: int, *, ep_size: int = 1, ep_rank: int = 0) -> None:
        super().__init__()
        if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
            fitting = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"{num_experts} experts on ep_size={ep_size} ranks; every rank has the same number of experts, so "
                f"that ep_size is one of {fitting}."
            )
        if not 0 <= ep_rank < ep_size:
            raise ValueError(f"expert-parallel rank {ep_rank} of ep_size={ep_size}; it is from 0 to {ep_size - 1}.")
        self.num_experts, self.num_local = num_experts, num_experts // ep_size
        self.first = ep_rank * self.num_local

    def forward(self, x: Tensor, counts: Tensor, which: slice | None = None) -> Tensor:
        """(R, D) of rows that follow each other expert by expert, ``counts`` (num_local,) of each; rows after them are
        0 and stay so. With ``which`` of some of the experts here, whose counts are given."""
        raise NotImplementedError

    def part(self, chunk: int, chunks: int) -> Callable[[Tensor, Tensor], Tensor]:
        """:meth:`forward` of one of ``chunks`` groups of consecutive experts; counts are theirs.

        It is a call of this module, so that whoever gathers its parameters does so on every rank, with rows or without.
        """
        size = self.num_local // chunks
        return functools.partial(self, which=slice(chunk * size, (chunk + 1) * size))

    def _declare(self, parameters: Sequence[nn.Parameter], *, whole: bool) -> None:
        """Parts along the expert axis: of one tensor over all experts (``whole``), or tensors of their own."""
        if self.num_local == self.num_experts:
            return
        for parameter in parameters:
            if whole:
                shape = (self.num_experts, *parameter.shape[1:])
                declare_split(parameter, [AXIS], shape=shape, offsets=(self.first, *(0 for _ in shape[1:])))
            else:
                declare_split(parameter, [AXIS])
