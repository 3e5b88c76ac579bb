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
def compress_(x: torch.Tensor, error: torch.Tensor, group_size: int = GROUP_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Signs and scales of c = x + error; ``error`` becomes what they leave out: c - decompressed.

    Args:
        x: contiguous, any shape, n elements, fp32, bf16 or fp16.
        error: fp32, as many elements, changed in place; zero before the first step.
        group_size: elements for each scale; a multiple of 64.

    Returns:
        bits, uint8, shape (ceil(n/8),), and scales, fp32, shape (ceil(n/group_size),).

    Raises:
        ValueError: a dtype, shape, layout or group size that cannot be.
    """

    def check() -> None:
        _check_group(group_size)
        check_flat(x, "x", x.numel(), NATIVE, x)
        check_flat(error, "error", x.numel(), (torch.float32,), x)

    found: tuple[torch.Tensor, torch.Tensor] = _compress(x, error, group_size, check=check)
    return found


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
        check_flat(bits, "bits", -(-out.numel() // 8), (torch.uint8,), out)
        check_flat(scales, "scales", -(-out.numel() // group_size), (torch.float32,), out)

    _decompress(out, bits, scales, group_size, add, check=check)


def _fake(x: torch.Tensor, error: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.numel()
    bits = x.new_empty((n + 7) // 8, dtype=torch.uint8)
    return bits, x.new_empty((n + group_size - 1) // group_size, dtype=torch.float32)


_compress = Operator("onebit_compress_", reference.compress_, fake=_fake)
_decompress = Operator("onebit_decompress_", reference.decompress_)


def _check_group(group_size: int) -> None:
    if not UNIT <= group_size <= LARGEST or group_size % UNIT:
        raise ValueError(f"group_size={group_size}; it must be a multiple of {UNIT} from {UNIT} to {LARGEST}.")
