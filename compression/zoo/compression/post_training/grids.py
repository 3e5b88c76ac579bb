"""Grids: which values the weights of a group may have, and the codes that stand for them.

Legend: x the values of a group, Q the largest code, s its scale, c codes.

| grid | values | source |
|---|---|---|
| :class:`Uniform`, symmetric | c·s, c in -Q … Q, Q = 2^(bits-1) - 1, s = max\\|x\\|/Q | as ``zoo.kernels.quantise`` |
| :class:`Uniform`, with a minimum | lo + c·s, c in 0 … Q, Q = 2^bits - 1, s = (max x - lo)/Q | the same |
| :class:`Floating` | s times a number of e exponent and m mantissa bits | Wu et al. 2023, "ZeroQuant-FP", section 3 |
| :class:`Ternary` | -s, 0, s | Li et al. 2016, "Ternary Weight Networks", equations 5 and 6 |
| :class:`Binary` | -s, s with s = mean\\|x\\| | Rastegari et al. 2016, "XNOR-Net", equation 6 |

Rounding is to nearest, ties to the even code; codes are rounded from x/s, so that one that lies between two may be the
other one of ``zoo.kernels.quantise``, which rounds x·(Q/max|x|).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from zoo.compression.quantisers.extreme import ternary_scale

Tensor = torch.Tensor
Params = tuple[Tensor, ...]
"""Numbers of each group, (R, 1) fp32: its scale, and its minimum where the grid has one."""


class Grid(Protocol):
    """Values that R groups of n numbers each may have."""

    @property
    def bits(self) -> float:
        """Of a code."""

    @property
    def num_params(self) -> int:
        """How many numbers a group has."""

    def fit(self, x: Tensor, shrink: float = 1.0) -> Params:
        """The numbers of each row of x, (R, n) fp32; what ends the range is multiplied by ``shrink`` first."""

    def encode(self, x: Tensor, params: Params) -> Tensor:
        """The nearest codes of x, (R, n) int16."""

    def decode(self, codes: Tensor, params: Params) -> Tensor:
        """Their values, (R, n) fp32."""


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Equal steps.

    Args:
        bits: 2 to 8.
        symmetric: around zero; else from the minimum on.
        half: scales and minima are fp16 numbers, as files of others have them (GGUF); beyond 65504 ``fit`` raises
            ValueError.
    """

    bits: int
    symmetric: bool = True
    half: bool = False

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in range(2, 9):
            raise ValueError(f"bits={self.bits!r}; equal steps take 2 to 8 bits (Ternary and Binary take fewer).")

    @property
    def num_params(self) -> int:
        """A scale, and a minimum."""
        return 1 if self.symmetric else 2

    @property
    def limit(self) -> int:
        """Q."""
        return (1 << (self.bits - 1 if self.symmetric else self.bits)) - 1

    def fit(self, x: Tensor, shrink: float = 1.0) -> Params:
        """See :class:`Grid`."""
        if self.symmetric:
            return self._numbers(x.abs().amax(1, keepdim=True) * (shrink / self.limit))
        low, high = x.aminmax(dim=1, keepdim=True)
        if shrink != 1:
            middle = (low + high) / 2
            low, high = middle + (low - middle) * shrink, middle + (high - middle) * shrink
        return self._numbers((high - low) / self.limit, low)

    def _numbers(self, *found: Tensor) -> Params:
        numbers = tuple(t.half().float() for t in found) if self.half else found
        if not all(bool(torch.isfinite(t).all()) for t in numbers):
            most = "fp16 holds (half=True), 65504" if self.half else "fp32 holds"
            raise ValueError(
                f"a group has a scale or minimum beyond what {most}: its largest is "
                f"{max(float(t.abs().max()) for t in found):.3g}. Scale the weights down first."
            )
        return numbers

    def encode(self, x: Tensor, params: Params) -> Tensor:
        """See :class:`Grid`."""
        scale = params[0]
        steps = (x if self.symmetric else x - params[1]) / scale.where(scale > 0, torch.inf)
        return steps.round_().clamp_(-self.limit if self.symmetric else 0, self.limit).short()

    def decode(self, codes: Tensor, params: Params) -> Tensor:
        """See :class:`Grid`."""
        values = codes.float() * params[0]
        return values if self.symmetric else values + params[1]


@functools.cache
def table_of(exponent: int, mantissa: int, finite: bool) -> Tensor:
    """The numbers from zero up that have so many bits, besides the sign: with subnormals and bias 2^(e-1) - 1; with
    ``finite`` the last exponent counts on, less the one code that is NaN in OCP's E4M3, else it is for infinities."""
    bias, ones = 2 ** (exponent - 1) - 1, 2**mantissa
    values = []
    for e in range(2**exponent):
        for m in range(ones):
            values.append((m / ones) * 2.0 ** (1 - bias) if e == 0 else (1 + m / ones) * 2.0 ** (e - bias))
    if not finite:
        values = values[:-ones]
    elif (exponent, mantissa) == (4, 3):
        values = values[:-1]
    return torch.tensor(values, dtype=torch.float32)


FORMATS = {"fp8_e4m3": (4, 3, True), "fp8_e5m2": (5, 2, False), "fp6_e3m2": (3, 2, True), "fp6_e2m3": (2, 3, True),
           "fp4_e2m1": (2, 1, True)}  # fmt: skip
"""Of the Open Compute Project (OCP 8-bit floating point 1.0; microscaling formats 1.0): exponent bits, mantissa bits,
whether all exponents are numbers."""


@dataclass(frozen=True, kw_only=True)
class Floating:
    """Numbers of few exponent and mantissa bits, times a scale: max|x| becomes the largest of them.

    Args:
        format: one of :data:`FORMATS`.
        power_of_two: the scale is 2^⌈log2 s⌉, so that a code is moved between formats by a shift (ZeroQuant-FP, "M1").
    """

    format: str
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r}; it must be one of {', '.join(FORMATS)}.")

    @property
    def bits(self) -> int:
        """Sign, exponent and mantissa."""
        return 1 + FORMATS[self.format][0] + FORMATS[self.format][1]

    @property
    def num_params(self) -> int:
        """A scale."""
        return 1

    @property
    def table(self) -> Tensor:
        """From zero up; a code is a place in it, with a sign: -place - 1 stands for a negative number, -0 too."""
        return table_of(*FORMATS[self.format])

    def fit(self, x: Tensor, shrink: float = 1.0) -> Params:
        """See :class:`Grid`."""
        scale = x.abs().amax(1, keepdim=True) * (shrink / float(self.table[-1]))
        if self.power_of_two:
            scale = torch.exp2(scale.log2().ceil()).where(scale > 0, 0.0)
        return (scale,)

    def encode(self, x: Tensor, params: Params) -> Tensor:
        """See :class:`Grid`."""
        scale, table = params[0], self.table.to(x.device)
        size = (x / scale.where(scale > 0, torch.inf)).abs()
        above = torch.searchsorted(table, size).clamp_(max=len(table) - 1)
        below = (above - 1).clamp_(min=0)
        up, down = table[above] - size, size - table[below]
        place = above.where((up < down) | ((up == down) & (above % 2 == 0)), below)
        return (-1 - place).where(x < 0, place).short()

    def decode(self, codes: Tensor, params: Params) -> Tensor:
        """See :class:`Grid`."""
        place, table = codes.long(), self.table.to(codes.device)
        return torch.where(place < 0, -table[(-1 - place).clamp(min=0)], table[place.clamp(min=0)]) * params[0]


class _Scaled:
    """Codes times one scale."""

    num_params = 1

    def decode(self, codes: Tensor, params: Params) -> Tensor:
        """See :class:`Grid`."""
        return codes.float() * params[0]


@dataclass(frozen=True)
class Ternary(_Scaled):
    """-s, 0 and s; s is that of :func:`zoo.compression.quantisers.extreme.ternary`, zero where |x| ≤ s/2."""

    bits: ClassVar[float] = 1.585  # log2 3

    def fit(self, x: Tensor, shrink: float = 1.0) -> Params:
        """See :class:`Grid`."""
        return (ternary_scale(x)[0] * shrink,)

    def encode(self, x: Tensor, params: Params) -> Tensor:
        """See :class:`Grid`."""
        return (x.sign() * (x.abs() > params[0] / 2)).short()


@dataclass(frozen=True)
class Binary(_Scaled):
    """-s and s, the mean of |x|; zero counts as positive."""

    bits: ClassVar[float] = 1.0

    def fit(self, x: Tensor, shrink: float = 1.0) -> Params:
        """See :class:`Grid`."""
        return (x.abs().mean(1, keepdim=True) * shrink,)

    def encode(self, x: Tensor, params: Params) -> Tensor:
        """See :class:`Grid`."""
        return torch.where(x < 0, -1, 1).short()


def fitted(grid: Grid, x: Tensor, *, candidates: int = 0) -> Params:
    """``grid.fit(x)``, or of ``candidates`` ranges besides, down to half of it, for each group the one that is nearest.

    Nearest is Σ(x - decode(encode(x)))²; the whole range wins where two are alike.
    """
    best = grid.fit(x)
    if not candidates:
        return best
    least = (grid.decode(grid.encode(x, best), best) - x).square_().sum(1, keepdim=True)
    for i in range(1, candidates + 1):
        tried = grid.fit(x, 1 - 0.5 * i / candidates)
        error = (grid.decode(grid.encode(x, tried), tried) - x).square_().sum(1, keepdim=True)
        better = error < least
        least = error.where(better, least)
        best = tuple(new.where(better, old) for new, old in zip(tried, best, strict=True))
    return best
