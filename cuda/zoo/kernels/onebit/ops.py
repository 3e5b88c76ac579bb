"""1-bit compression: native on CPUs and on CUDA, else the reference."""

from __future__ import annotations

import torch

from zoo.kernels.checks import NATIVE, check_flat
from zoo.kernels.onebit import reference
from zoo.kernels.operators import Operator

GROUP_SIZE = 2048
"""Elements for each scale by default: 1/31.5 of fp32 on the wire."""
UNIT, LARGEST = 64, 1 << 20


def wire_bytes(numel: int, group_size: int = GROUP_SIZE) -> int:
    """Bytes that travel for ``numel`` elements: ceil(n/8) of bits, 4·ceil(n/group_size) of scales."""
    return -(-numel // 8) + 4 * -(-numel // group_size)


@torch.no_grad()
def compress_(
    x: torch.Tensor, error: torch.Tensor | None = None, group_size: int = GROUP_SIZE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Signs and scales of c = x + error, which takes the place of ``x``; what they leave out is :func:`owed_`.

    Args:
        x: contiguous, any shape, n elements, fp32; without ``error`` also bf16 or fp16, and unchanged.
        error: fp32, as many elements; None for zero.
        group_size: elements for each scale; a multiple of 64.

    Returns:
        bits, uint8, shape (ceil(n/8),), and scales, fp32, shape (ceil(n/group_size),).

    Raises:
        ValueError: a dtype, shape, layout or group size that cannot be.
    """

    def check() -> None:
        _check_group(group_size)
        if error is None:
            check_flat(x, "x", x.numel(), NATIVE, x)
        else:
            check_flat(x, "x", x.numel(), (torch.float32,), x)
            check_flat(error, "error", x.numel(), (torch.float32,), x)

    found: tuple[torch.Tensor, torch.Tensor] = _compress(x, error, group_size, check=check)
    return found


@torch.no_grad()
def owed_(
    error: torch.Tensor, c: torch.Tensor, bits: torch.Tensor, scales: torch.Tensor, group_size: int = GROUP_SIZE
) -> None:
    """error ← c - decompressed: what is to be added next time. ``error`` may be ``c``.

    Args:
        error, c: fp32, contiguous, n elements each.
        bits, scales: what :func:`compress_` made of c.

    Raises:
        ValueError: a dtype, shape, layout or group size that cannot be.
    """

    def check() -> None:
        _check_group(group_size)
        check_flat(error, "error", error.numel(), (torch.float32,), error)
        check_flat(c, "c", error.numel(), (torch.float32,), error)
        _check_wire(bits, scales, error, group_size)

    _owed(error, c, bits, scales, group_size, check=check)


@torch.no_grad()
def decompress_(
    out: torch.Tensor, bits: torch.Tensor, scales: torch.Tensor, group_size: int = GROUP_SIZE, *, add: bool = False
) -> None:
    """out ← ±scale, or with ``add`` out ← out ± scale, which sums what several ranks sent.

    Args:
        out: contiguous, any shape, fp32, bf16 or fp16; what the bits and scales were made from in size.

    Raises:
        ValueError: a dtype, shape, layout or group size that cannot be.
    """

    def check() -> None:
        _check_group(group_size)
        check_flat(out, "out", out.numel(), NATIVE, out)
        _check_wire(bits, scales, out, group_size)

    _decompress(out, bits, scales, group_size, add, check=check)


def _fake(x: torch.Tensor, error: torch.Tensor | None, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.numel()
    bits = x.new_empty((n + 7) // 8, dtype=torch.uint8)
    return bits, x.new_empty((n + group_size - 1) // group_size, dtype=torch.float32)


_compress = Operator("onebit_compress_", reference.compress_, fake=_fake)
_owed = Operator("onebit_owed_", reference.owed_)
_decompress = Operator("onebit_decompress_", reference.decompress_)


def _check_group(group_size: int) -> None:
    if not UNIT <= group_size <= LARGEST or group_size % UNIT:
        raise ValueError(f"group_size={group_size}; it must be a multiple of {UNIT} from {UNIT} to {LARGEST}.")


def _check_wire(bits: torch.Tensor, scales: torch.Tensor, like: torch.Tensor, group_size: int) -> None:
    check_flat(bits, "bits", -(-like.numel() // 8), (torch.uint8,), like)
    check_flat(scales, "scales", -(-like.numel() // group_size), (torch.float32,), like)
