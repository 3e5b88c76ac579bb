"""Integers of 8 or 4 bits, and a scale, or a scale and a minimum, for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from zoo.comm.compression.codec import Codec, whole_words
from zoo.comm.compression.kernels import quantise

Tensor = torch.Tensor


class Blockwise(Codec):
    """C(c)_i = s·round(c_i/s), s = max|c|/Q of each block, Q = 127 or 7 (``zoo/kernels/quantise/quantise.h``).

    Asymmetric: C(c)_i = s·round((c_i - m)/s) + m, m = min c, s = (max c - m)/Q, Q = 255 or 15.

    Wire: scales, minima if asymmetric, then integers; with 8 bits and blocks of 256 1/3.94 of fp32, asymmetric 1/3.88.
    """

    name = "blockwise"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options.

        Attributes:
            bits: 8 or 4.
            group_size: elements for each scale, a multiple of 16, at most 2^20.
            symmetric: False for numbers that do not lie around zero; it costs 4 bytes a block.
        """

        bits: Literal[4, 8] = 8
        group_size: int = 256
        symmetric: bool = True

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        bits, size = self.config.bits, self.config.group_size
        if bits not in (4, 8):
            raise ValueError(f"Blockwise got bits={bits}; allowed are 4 and 8.")
        if not 16 <= size <= 1 << 20 or size % 16:
            raise ValueError(f"Blockwise got group_size={size}; it must be a multiple of 16 from 16 to 1048576.")

    def _parts(self, wire: Tensor, numel: int) -> tuple[Tensor, ...]:
        """Integers, scales and, if asymmetric, minima."""
        *of_groups, q = torch.split_with_sizes(wire, self._sizes(numel))
        integers = q[: self._q_bytes(numel)].view(torch.int8 if self.config.symmetric else torch.uint8)
        return integers, *(each.view(torch.float32) for each in of_groups)

    def _sizes(self, numel: int) -> list[int]:
        """Bytes of the parts of the wire, in its order."""
        of_groups = 4 * -(-numel // self.config.group_size)
        return [*[of_groups] * (1 if self.config.symmetric else 2), whole_words(self._q_bytes(numel))]

    def _q_bytes(self, numel: int) -> int:
        return -(-numel * self.config.bits // 8)

    def wire_bytes(self, numel: int) -> int:
        """See :class:`Codec`: 4·ceil(n/group), asymmetric 8·ceil(n/group), + ceil(n·bits/8), in whole words."""
        return sum(self._sizes(numel))

    def encode_(self, c: Tensor, error: Tensor | None, wire: Tensor) -> None:
        """See :class:`Codec`."""
        if error is not None:
            c.add_(error)
        ops = quantise()
        operation = ops.quantise if self.config.symmetric else ops.quantise_asymmetric
        found = operation(c, bits=self.config.bits, group_size=self.config.group_size)
        for part, value in zip(self._parts(wire, c.numel()), found, strict=True):
            part.copy_(value)

    def decode_(self, out: Tensor, wire: Tensor, *, add: bool = False) -> None:
        """See :class:`Codec`."""
        ops, to = quantise(), torch.empty_like(out) if add else out
        operation = ops.dequantise_ if self.config.symmetric else ops.dequantise_asymmetric_
        parts = self._parts(wire, out.numel())
        operation(to, *parts, bits=self.config.bits, group_size=self.config.group_size)
        if add:
            out.add_(to)
