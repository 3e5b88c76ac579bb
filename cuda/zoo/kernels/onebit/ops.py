"""1-bit compression: native on CPUs and on CUDA, else the reference."""

from __future__ import annotations

from typing import Any

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


Sent = tuple[torch.Tensor, torch.Tensor]
"""Bits, uint8, of shape (ceil(n/8),), and scales, fp32, of shape (ceil(n/group_size),)."""


@torch.no_grad()
def compress_(
    x: torch.Tensor, error: torch.Tensor | None = None, group_size: int = GROUP_SIZE, *,
    out: torch.Tensor | None = None, sent: Sent | None = None,
) -> Sent:  # fmt: skip
    """Signs and scales of c = x + e, which takes the place of ``x``; what they leave out is :func:`owed_`.

    Args:
        x: contiguous, any shape, n elements, fp32; without ``error`` or with ``out`` also bf16 or fp16, and unchanged.
        error: fp32, as many elements: e; None for zero.
        group_size: elements for each scale; a multiple of 64.
        out: fp32, as many elements: c goes there instead. It may be ``error``.
        sent: what this function made of ``error`` when it was c: then e = error - decompressed, in the same pass.

    Raises:
        ValueError: a dtype, shape, layout or group size that cannot be.
    """

    c, given = (x, None) if out is None else (out, x)

    def check() -> None:
        _check_group(group_size)
        check_flat(x, "x", c.numel(), NATIVE if out is not None or error is None else (torch.float32,), c)
        if out is not None:
            check_flat(out, "out", c.numel(), (torch.float32,), c)
        _check_before(error, sent, c, group_size)

    found: Sent = _compress(c, given, error, *(sent or (None, None)), group_size, check=check)
    return found


@torch.no_grad()
def compress_mean_(
    out: torch.Tensor, wires: torch.Tensor, error: torch.Tensor | None = None, group_size: int = GROUP_SIZE, *,
    sent: Sent | None = None,
) -> Sent:  # fmt: skip
    """``out`` ← c = mean + e, and its signs and scales; the mean is that of what D ranks sent.

    Args:
        out: (n,) fp32, contiguous. It may be ``error``.
        wires: (D, w) uint8, contiguous: of each rank the scales, then the bits, then what is not read; 4 divides w.
        error, group_size, sent: as in :func:`compress_`.

    Raises:
        ValueError: a dtype, shape, layout or group size that cannot be.
    """

    def check() -> None:
        _check_group(group_size)
        check_flat(out, "out", out.numel(), (torch.float32,), out)
        check_flat(wires, "wires", wires.numel(), (torch.uint8,), out)
        needed = wire_bytes(out.numel(), group_size)
        shape = tuple(wires.shape)
        if len(shape) != 2 or not shape[0] or shape[1] % 4 or shape[1] < needed or wires.storage_offset() % 4:
            raise ValueError(
                f"wires are of shape {shape}; each of one or more rows must begin at a multiple of 4 bytes and have "
                f"at least {needed} for {out.numel()} elements."
            )
        _check_before(error, sent, out, group_size)

    found: Sent = _compress_mean(out, wires, error, *(sent or (None, None)), group_size, check=check)
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


def _fake(c: torch.Tensor, *rest: Any) -> Sent:
    n, group_size = c.numel(), rest[-1]
    bits = c.new_empty((n + 7) // 8, dtype=torch.uint8)
    return bits, c.new_empty((n + group_size - 1) // group_size, dtype=torch.float32)


_compress = Operator("onebit_compress_", reference.compress_, fake=_fake)
_compress_mean = Operator("onebit_compress_mean_", reference.compress_mean_, fake=_fake)
_owed = Operator("onebit_owed_", reference.owed_)
_decompress = Operator("onebit_decompress_", reference.decompress_)


def _check_group(group_size: int) -> None:
    if not UNIT <= group_size <= LARGEST or group_size % UNIT:
        raise ValueError(f"group_size={group_size}; it must be a multiple of {UNIT} from {UNIT} to {LARGEST}.")


def _check_wire(bits: torch.Tensor, scales: torch.Tensor, like: torch.Tensor, group_size: int) -> None:
    check_flat(bits, "bits", -(-like.numel() // 8), (torch.uint8,), like)
    check_flat(scales, "scales", -(-like.numel() // group_size), (torch.float32,), like)


def _check_before(error: torch.Tensor | None, sent: Sent | None, like: torch.Tensor, group_size: int) -> None:
    if error is not None:
        check_flat(error, "error", like.numel(), (torch.float32,), like)
    if sent is not None:
        if error is None:
            raise ValueError("sent bits, sent scales and the error that they stand for go together.")
        _check_wire(*sent, like, group_size)
