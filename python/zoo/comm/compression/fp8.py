"""Floats of 8 bits and a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from zoo.comm.compression.codec import Codec, whole_words

Tensor = torch.Tensor
_LARGEST = 448.0  # of e4m3


class Fp8(Codec):
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

    def _groups(self, numel: int) -> int:
        return -(-numel // self.config.group_size)

    def wire_bytes(self, numel: int) -> int:
        """See :class:`Codec`: 4·ceil(n/group) + n, in whole words."""
        return 4 * self._groups(numel) + whole_words(numel)

    def encode_(self, c: Tensor, error: Tensor | None, wire: Tensor) -> None:
        """See :class:`Codec`."""
        if error is not None:
            c.add_(error)
        groups, size, n = self._groups(c.numel()), self.config.group_size, c.numel()
        if not n:
            return
        blocks = F.pad(c, (0, groups * size - n)).view(groups, size)
        scales = blocks.abs().amax(1) / _LARGEST
        # A block of zeros has any scale; a NaN or infinity makes its block NaN.
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        q = (blocks / scales[:, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(-1)[:n]
        wire[: 4 * groups].view(torch.float32).copy_(scales)
        wire[4 * groups : 4 * groups + n].copy_(q.view(torch.uint8))

    def decode_(self, out: Tensor, wire: Tensor, *, add: bool = False) -> None:
        """See :class:`Codec`."""
        groups, n = self._groups(out.numel()), out.numel()
        q = wire[4 * groups : 4 * groups + n].view(torch.float8_e4m3fn).float()
        scales = wire[: 4 * groups].view(torch.float32).repeat_interleave(self.config.group_size)[:n]
        y = q.mul_(scales)
        out.add_(y) if add else out.copy_(y)
