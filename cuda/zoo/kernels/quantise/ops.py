"""Quantisation: native on CPUs and on CUDA, else the reference."""

from __future__ import annotations

import torch

from zoo.kernels.checks import NATIVE, check_flat
from zoo.kernels.operators import Operator
from zoo.kernels.quantise import reference

UNIT, LARGEST = 16, 1 << 20


@torch.no_grad()
def quantise(
    x: torch.Tensor, *, bits: int = 8, group_size: int = 256, swizzle: tuple[int, int] = (1, 1)
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round(x/s) and s = max|x|/Q of each group of ``group_size`` elements.

    Args:
        x: contiguous, any shape, n elements, fp32, bf16 or fp16.
        bits: 8, or 4 (two elements a byte).
        group_size: a multiple of 16.
        swizzle: (nodes, ranks of a node): x is that many pieces, and piece (n, l) is written to place (l, n).

    Returns:
        q, int8, shape (ceil(n·bits/8),), and s, fp32, shape (ceil(n/group_size),).

    Raises:
        ValueError: a dtype, layout, group size or number of pieces that cannot be.
    """
    nodes, local = swizzle

    def check() -> None:
        _check_options(bits, group_size)
        check_flat(x, "x", x.numel(), NATIVE, x)
        if nodes < 1 or local < 1 or (nodes * local > 1 and x.numel() % (nodes * local * group_size)):
            raise ValueError(
                f"swizzle=({nodes}, {local}) cuts {x.numel()} elements into {nodes} x {local} pieces; each must be a "
                f"whole number of groups of {group_size}."
            )

    found: tuple[torch.Tensor, torch.Tensor] = _quantise(x, bits, group_size, nodes, local, check=check)
    return found


@torch.no_grad()
def dequantise_(
    out: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, *, bits: int = 8, group_size: int = 256, ranks: int = 1,
    factor: float = 1.0,
) -> None:  # fmt: skip
    """out ← factor·Σ_r s_r·q_r over ``ranks`` quantised tensors that lie one after the other in q and in scales.

    With ``ranks=1`` it dequantises; with more it reduces what an all-to-all delivered, in one pass.

    Raises:
        ValueError: a dtype, shape, layout or group size that cannot be.
    """

    def check() -> None:
        _check_options(bits, group_size)
        if ranks < 1:
            raise ValueError(f"ranks={ranks}; it must be at least 1.")
        check_flat(out, "out", out.numel(), NATIVE, out)
        check_flat(q, "q", ranks * -(-out.numel() * bits // 8), (torch.int8,), out)
        check_flat(scales, "scales", ranks * -(-out.numel() // group_size), (torch.float32,), out)

    _dequantise(out, q, scales, bits, group_size, ranks, factor, check=check)


def _fake(x: torch.Tensor, bits: int, group_size: int, *_: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.numel()
    q = x.new_empty((n * bits + 7) // 8, dtype=torch.int8)
    return q, x.new_empty((n + group_size - 1) // group_size, dtype=torch.float32)


_quantise = Operator("quantise", reference.quantise, fake=_fake)
_dequantise = Operator("dequantise_", reference.dequantise_)


def _check_options(bits: int, group_size: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}; it must be 8 or 4.")
    if not UNIT <= group_size <= LARGEST or group_size % UNIT:
        raise ValueError(f"group_size={group_size}; it must be a multiple of {UNIT} from {UNIT} to {LARGEST}.")
