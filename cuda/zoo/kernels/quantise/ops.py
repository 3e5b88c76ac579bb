"""Quantisation: native on CPUs and on CUDA, else the reference."""

from __future__ import annotations

import torch

from zoo.kernels.checks import NATIVE, check_flat
from zoo.kernels.operators import Operator
from zoo.kernels.quantise import reference

Tensor = torch.Tensor
UNIT, LARGEST = 16, 1 << 20


@torch.no_grad()
def quantise(
    x: Tensor, *, bits: int = 8, group_size: int = 256, swizzle: tuple[int, int] = (1, 1)
) -> tuple[Tensor, Tensor]:
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
    found: tuple[Tensor, Tensor] = _quantise(
        x, bits, group_size, *swizzle, check=lambda: _check_quantise(x, bits, group_size, *swizzle)
    )
    return found


@torch.no_grad()
def quantise_asymmetric(
    x: Tensor, *, bits: int = 8, group_size: int = 256, swizzle: tuple[int, int] = (1, 1)
) -> tuple[Tensor, Tensor, Tensor]:
    """q = round((x - lo)/s), s = (max x - lo)/(2^bits - 1) and lo = min x of each group of ``group_size`` elements.

    For numbers that do not lie around zero: the steps are half as long where all have one sign. Arguments and errors
    are those of :func:`quantise`.

    Returns:
        q, uint8, shape (ceil(n·bits/8),), and s and lo, fp32, shape (ceil(n/group_size),) each.
    """
    found: tuple[Tensor, Tensor, Tensor] = _quantise_asymmetric(
        x, bits, group_size, *swizzle, check=lambda: _check_quantise(x, bits, group_size, *swizzle)
    )
    return found


@torch.no_grad()
def dequantise_(
    out: Tensor, q: Tensor, scales: Tensor, *, bits: int = 8, group_size: int = 256, ranks: int = 1,
    factor: float = 1.0,
) -> None:  # fmt: skip
    """out ← factor·Σ_r s_r·q_r over ``ranks`` quantised tensors that lie one after the other in q and in scales.

    With ``ranks=1`` it dequantises; with more it reduces what an all-to-all delivered, in one pass.

    Raises:
        ValueError: a dtype, shape, layout or group size that cannot be.
    """
    _dequantise(
        out, q, scales, bits, group_size, ranks, factor,
        check=lambda: _check_dequantise(out, q, torch.int8, bits, group_size, ranks, scales=scales),
    )  # fmt: skip


@torch.no_grad()
def dequantise_asymmetric_(
    out: Tensor, q: Tensor, scales: Tensor, minima: Tensor, *, bits: int = 8, group_size: int = 256, ranks: int = 1,
    factor: float = 1.0,
) -> None:  # fmt: skip
    """out ← factor·Σ_r (s_r·q_r + lo_r): :func:`dequantise_` for what :func:`quantise_asymmetric` returned."""
    _dequantise_asymmetric(
        out, q, scales, minima, bits, group_size, ranks, factor,
        check=lambda: _check_dequantise(out, q, torch.uint8, bits, group_size, ranks, scales=scales, minima=minima),
    )  # fmt: skip


def _fake(x: Tensor, bits: int, group_size: int, *_: int) -> tuple[Tensor, Tensor]:
    n = x.numel()
    q = x.new_empty((n * bits + 7) // 8, dtype=torch.int8)
    return q, x.new_empty((n + group_size - 1) // group_size, dtype=torch.float32)


def _fake_asymmetric(x: Tensor, bits: int, group_size: int, *_: int) -> tuple[Tensor, Tensor, Tensor]:
    q, scales = _fake(x, bits, group_size)
    return torch.empty_like(q, dtype=torch.uint8), scales, torch.empty_like(scales)


_quantise = Operator("quantise", reference.quantise, fake=_fake)
_quantise_asymmetric = Operator("quantise_asymmetric", reference.quantise_asymmetric, fake=_fake_asymmetric)
_dequantise = Operator("dequantise_", reference.dequantise_)
_dequantise_asymmetric = Operator("dequantise_asymmetric_", reference.dequantise_asymmetric_)


def _check_quantise(x: Tensor, bits: int, group_size: int, nodes: int, local: int) -> None:
    _check_options(bits, group_size)
    check_flat(x, "x", x.numel(), NATIVE, x)
    if nodes < 1 or local < 1 or (nodes * local > 1 and x.numel() % (nodes * local * group_size)):
        raise ValueError(
            f"swizzle=({nodes}, {local}) cuts {x.numel()} elements into {nodes} x {local} pieces; each must be a "
            f"whole number of groups of {group_size}."
        )


def _check_dequantise(
    out: Tensor, q: Tensor, dtype: torch.dtype, bits: int, group_size: int, ranks: int, **of_groups: Tensor
) -> None:
    _check_options(bits, group_size)
    if ranks < 1:
        raise ValueError(f"ranks={ranks}; it must be at least 1.")
    check_flat(out, "out", out.numel(), NATIVE, out)
    check_flat(q, "q", ranks * -(-out.numel() * bits // 8), (dtype,), out)
    for name, t in of_groups.items():
        check_flat(t, name, ranks * -(-out.numel() // group_size), (torch.float32,), out)


def _check_options(bits: int, group_size: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}; it must be 8 or 4.")
    if not UNIT <= group_size <= LARGEST or group_size % UNIT:
        raise ValueError(f"group_size={group_size}; it must be a multiple of {UNIT} from {UNIT} to {LARGEST}.")
