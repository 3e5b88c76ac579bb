"""Floats of 8 bits and a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from zoo.comm.compression.grouped import Grouped

Tensor = torch.Tensor
_LARGEST = 448.0  # of e4m3


class Fp8(Grouped):
    """C(c)_i = s·fp8(c_i/s), s = max|c|/448 of each block, in the format e4m3: 4 bits of exponent, 3 of mantissa.

    Micikevicius et al. 2022, "FP8 Formats for Deep Learning". An element is off by at most 1/16 of itself, or by s/1024
    where it is smaller than s/64; blocks are there because a tensor's numbers span more than the format's 2^18.
    """

    name = "fp8"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options.

        Attributes:
            group_size: elements for each scale.
        """

        group_size: int = 256

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        if self.config.group_size < 1:
            raise ValueError(f"Fp8 got group_size={self.config.group_size}; it must be at least 1.")

        super().__init__(bits=8, group_size=self.config.group_size, num_of_group=1, dtype=torch.uint8)

    def _quantise(self, c: Tensor) -> tuple[Tensor, ...]:
        n, size = c.numel(), self.config.group_size
        groups = -(-n // size)
        blocks = F.pad(c, (0, groups * size - n)) if n % size else c
        blocks = blocks.view(groups, size)
        scales = blocks.abs().amax(1) / _LARGEST
        # A block of zeros has any scale; a NaN or infinity makes its block NaN.
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        q = (blocks / scales[:, None]).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(-1)[:n]
        return q.view(torch.uint8), scales

    def _dequantise(self, out: Tensor, *parts: Tensor) -> None:
        q, scales = parts
        each = scales.repeat_interleave(self.config.group_size)[: out.numel()]
        torch.mul(q.view(torch.float8_e4m3fn).float(), each, out=out)
