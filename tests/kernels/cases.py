"""Tensors for the tests of kernels: sizes, formats, alignments and values that are likely to go wrong."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = st.one_of(
    st.sampled_from([0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1025, 4160]), st.integers(0, 3000)
)
SPECIAL = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-45, -3e-39, 1e-30, 3e38, 6e-8, 65519.0, 65520.0]


def values(n: int, seed: int, *, special: bool = False, positive: bool = False) -> torch.Tensor:
    """fp32 numbers of many magnitudes; with ``special`` about one in twenty is infinite, NaN, zero or subnormal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * torch.exp2(torch.randint(-12, 4, (n,), generator=generator).float())
    if special and n:
        where = torch.rand(n, generator=generator) < 0.05
        picks = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (n,), generator=generator)]
        x = torch.where(where, picks, x)
    return x.abs() if positive else x


def placed(x: torch.Tensor, dtype: torch.dtype, offset: int) -> torch.Tensor:
    """``x`` in ``dtype``, ``offset`` elements after the beginning of its memory: at an odd address for odd offsets."""
    room = torch.empty(x.numel() + offset, dtype=dtype)
    room[offset:].copy_(x)
    return room[offset:]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit; any NaN equals any NaN (IEEE 754 leaves its payload open), zeros keep their sign."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[a.element_size()]
    equal = a.contiguous().view(bits) == b.contiguous().view(bits)
    if a.is_floating_point():
        equal |= a.isnan() & b.isnan()
    return bool(equal.all())


def random_indices(tokens: int, choices: int, experts: int, seed: int) -> torch.Tensor:
    """``choices`` different experts a token, the lower ones more often."""
    generator = torch.Generator().manual_seed(seed)
    likely = 1.0 / (1.0 + torch.arange(experts))
    if tokens == 0:
        return torch.zeros(0, choices, dtype=torch.int64)
    return torch.multinomial(likely.expand(tokens, experts), choices, generator=generator)
