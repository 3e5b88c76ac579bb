"""Integers of 8 or 4 bits, and a scale, or a scale and a minimum, for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from zoo.comm.compression.grouped import Grouped
from zoo.comm.compression.kernels import quantise

Tensor = torch.Tensor


class Blockwise(Grouped):
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

        symmetric = self.config.symmetric
        super().__init__(
            bits=bits, group_size=size, num_of_group=1 if symmetric else 2,
            dtype=torch.int8 if symmetric else torch.uint8,
        )  # fmt: skip

    def _quantise(self, c: Tensor) -> tuple[Tensor, ...]:
        ops = quantise()
        operation = ops.quantise if self.config.symmetric else ops.quantise_asymmetric
        found: tuple[Tensor, ...] = operation(c, bits=self.config.bits, group_size=self.config.group_size)
        return found

    def _dequantise(self, out: Tensor, *parts: Tensor) -> None:
        ops = quantise()
        operation = ops.dequantise_ if self.config.symmetric else ops.dequantise_asymmetric_
        operation(out, *parts, bits=self.config.bits, group_size=self.config.group_size)
