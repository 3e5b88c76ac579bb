"""Signs and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from zoo.comm.compression.codec import Codec, whole_words
from zoo.comm.compression.kernels import onebit

Tensor = torch.Tensor


class OneBit(Codec):
    """C(c)_i = ±s with the sign of c_i (that of 0 is plus): a bit an element and one fp32 for each group.

    ``scale="mean"``: s = mean |c| of each group of ``group_size`` elements, which leaves least out of all s (Tang et
    al. 2021, "1-bit Adam", section 4; the kernel's header has more). ``scale="norm"``: s = ‖c‖₂/√n of all that is
    encoded at once, which is no contraction: an error can grow without bound where magnitudes differ much. It is here
    because published runs used it.

    Wire: scales, then bits; 1/31.5 of fp32 with groups of 2,048.
    """

    name = "onebit"
    one_pass = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options.

        Attributes:
            group_size: elements for each scale, a multiple of 64, at most 2^20.
            scale: "mean" or "norm".
        """

        group_size: int = 2048
        scale: Literal["mean", "norm"] = "mean"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        if self.config.scale not in ("mean", "norm"):
            raise ValueError(f"OneBit got scale={self.config.scale!r}; allowed are 'mean' and 'norm'.")
        size = self.config.group_size
        if not 64 <= size <= 1 << 20 or size % 64:
            raise ValueError(f"OneBit got group_size={size}; it must be a multiple of 64 from 64 to 1048576.")

    def _scale_bytes(self, numel: int) -> int:
        if self.config.scale == "norm":
            return 4 * min(numel, 1)
        return 4 * -(-numel // self.config.group_size)

    def wire_bytes(self, numel: int) -> int:
        """See :class:`Codec`: 4·ceil(n/group) + ceil(n/8), in whole words."""
        return self._scale_bytes(numel) + whole_words(-(-numel // 8))

    def encode_(self, c: Tensor, error: Tensor | None, wire: Tensor) -> None:
        """See :class:`Codec`."""
        self._write(wire, c, onebit().compress_(c, error, self.config.group_size))

    def encode_sum_(self, c: Tensor, x: Tensor, error: Tensor | None, last: Tensor | None, wire: Tensor) -> None:
        """See :class:`Codec`."""
        sent = None if last is None else self._parts(c.numel(), last)
        self._write(wire, c, onebit().compress_(x, error, self.config.group_size, out=c, sent=sent))

    def encode_mean_(self, c: Tensor, wires: Tensor, error: Tensor | None, last: Tensor | None, wire: Tensor) -> None:
        """See :class:`Codec`."""
        if self.config.scale == "norm":  # its wires have one scale for all groups
            return super().encode_mean_(c, wires, error, last, wire)
        sent = None if last is None else self._parts(c.numel(), last)
        self._write(wire, c, onebit().compress_mean_(c, wires, error, self.config.group_size, sent=sent))
        return None

    def _write(self, wire: Tensor, c: Tensor, found: tuple[Tensor, Tensor]) -> None:
        bits, scales = found
        if self.config.scale == "norm" and c.numel():
            scales = (torch.linalg.vector_norm(c) / c.numel() ** 0.5).view(1)
        head = self._scale_bytes(c.numel())
        wire[:head].view(torch.float32).copy_(scales)
        wire[head : head + bits.numel()].copy_(bits)

    def _parts(self, numel: int, wire: Tensor) -> tuple[Tensor, Tensor]:
        head = self._scale_bytes(numel)
        scales = wire[:head].view(torch.float32)
        if self.config.scale == "norm":
            scales = scales.repeat(-(-numel // self.config.group_size))
        return wire[head : head - (-numel // 8)], scales

    def decode_(self, out: Tensor, wire: Tensor, *, add: bool = False) -> None:
        """See :class:`Codec`."""
        onebit().decompress_(out, *self._parts(out.numel(), wire), self.config.group_size, add=add)

    def owed_(self, error: Tensor, c: Tensor, wire: Tensor) -> None:
        """See :class:`Codec`."""
        onebit().owed_(error, c, *self._parts(c.numel(), wire), self.config.group_size)
