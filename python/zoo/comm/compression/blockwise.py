"""Integers of 8 or 4 bits and a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from zoo.comm.compression.codec import Codec, whole_words
from zoo.comm.compression.kernels import quantise

if TYPE_CHECKING:
    from zoo.comm import Communicator
    from zoo.comm.compression.two_step import TwoStep

Tensor = torch.Tensor


class Blockwise(Codec):
    """C(c)_i = s·round(c_i/s), s = max|c|/Q of each block, Q = 127 or 7 (``zoo/kernels/quantise/quantise.h``).

    Wire: scales, then integers; 1/3.94 of fp32 with 8 bits and blocks of 256.
    """

    name = "blockwise"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options.

        Attributes:
            bits: 8 or 4.
            group_size: elements for each scale, a multiple of 16, at most 2^20.
        """

        bits: Literal[4, 8] = 8
        group_size: int = 256

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        bits, size = self.config.bits, self.config.group_size
        if bits not in (4, 8):
            raise ValueError(f"Blockwise got bits={bits}; allowed are 4 and 8.")
        if not 16 <= size <= 1 << 20 or size % 16:
            raise ValueError(f"Blockwise got group_size={size}; it must be a multiple of 16 from 16 to 1048576.")

    def reducer(self, comm: Communicator, numel: int) -> TwoStep:
        """How tensors of n elements are averaged."""
        from zoo.comm.compression.two_step import TwoStep

        return TwoStep(comm, self, numel)

    def _scale_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.config.group_size)

    def _q_bytes(self, numel: int) -> int:
        return -(-numel * self.config.bits // 8)

    def wire_bytes(self, numel: int) -> int:
        """See :class:`Codec`: 4·ceil(n/group) + ceil(n·bits/8), in whole words."""
        return self._scale_bytes(numel) + whole_words(self._q_bytes(numel))

    def encode_(self, c: Tensor, error: Tensor | None, wire: Tensor) -> None:
        """See :class:`Codec`."""
        if error is not None:
            c.add_(error)
        q, scales = quantise().quantise(c, bits=self.config.bits, group_size=self.config.group_size)
        head = self._scale_bytes(c.numel())
        wire[:head].view(torch.float32).copy_(scales)
        wire[head : head + q.numel()].copy_(q.view(torch.uint8))

    def decode_(self, out: Tensor, wire: Tensor, *, add: bool = False) -> None:
        """See :class:`Codec`."""
        head = self._scale_bytes(out.numel())
        q, scales = wire[head : head + self._q_bytes(out.numel())], wire[:head].view(torch.float32)
        to = torch.empty_like(out) if add else out
        how = {"bits": self.config.bits, "group_size": self.config.group_size}
        quantise().dequantise_(to, q.view(torch.int8), scales, **how)
        if add:
            out.add_(to)
