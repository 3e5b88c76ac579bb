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

    Of each group of ``group_size`` elements, n of them, with a = ``factor``:

        "mean"  s = a·mean |c|      ‖c - C(c)‖² = ‖c‖² - a·(2 - a)·‖c‖₁²/n, less than ‖c‖² where 0 < a < 2
        "rms"   s = a·√(mean c²)
        "norm"  the same of all elements that are encoded at once: one scale

    One call leaves least with a = 1 of the mean (Tang et al. 2021, "1-bit Adam", section 4; the kernel's header has
    more). With what is left out fed back, many calls leave least with about 1.5, which is the default: see
    ``benchmarks/onebit/SCALE.md``. The other two are no contractions: an error can grow without bound where magnitudes
    differ much. "norm" is here because published runs used it.

    Wire: scales, then bits; 1/31.5 of fp32 with groups of 2,048.
    """

    name = "onebit"
    one_pass = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options.

        Attributes:
            group_size: elements for each scale, a multiple of 64, at most 2^20.
            scale: "mean", "rms" or "norm".
            factor: a, above 0 and below 2; None for 1.5 of the mean, 1.2 of "rms", 1 of "norm".
        """

        group_size: int = 2048
        scale: Literal["mean", "rms", "norm"] = "mean"
        factor: float | None = None

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        if self.config.scale not in ("mean", "rms", "norm"):
            raise ValueError(f"OneBit got scale={self.config.scale!r}; allowed are 'mean', 'rms' and 'norm'.")
        self.factor = {"mean": 1.5, "rms": 1.2, "norm": 1.0}[self.config.scale]
        if self.config.factor is not None:
            self.factor = float(self.config.factor)
        if not 0 < self.factor < 2:
            raise ValueError(
                f"OneBit got factor={self.config.factor}; it must be above 0 and below 2: from 2 on, what is left out "
                "grows from call to call."
            )
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
        elif self.config.scale == "rms" and c.numel():
            scales = _root_mean_squares(c, self.config.group_size)
        head = self._scale_bytes(c.numel())
        torch.mul(scales, self.factor, out=wire[:head].view(torch.float32))
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


def _root_mean_squares(c: Tensor, group: int) -> Tensor:
    """√(mean c²) of each group of consecutive elements, the last one shorter."""
    whole = c.numel() // group * group
    parts = [c[:whole].view(-1, group), c[whole:].view(1, -1)]
    return torch.cat([torch.linalg.vector_norm(p, dim=1) / max(p.shape[1], 1) ** 0.5 for p in parts if p.numel()])
