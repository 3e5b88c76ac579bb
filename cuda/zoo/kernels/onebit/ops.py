"""1-bit compression: native on CPUs and on CUDA, else the reference."""

from __future__ import annotations

import torch

from zoo.kernels import loading
from zoo.kernels.checks import check_flat, one_device
from zoo.kernels.onebit import reference

GROUP_SIZE = 2048
"""Elements for each scale by default: 1/31.5 of fp32 on the wire."""
UNIT, LARGEST = 64, 1 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    if one_device(x, error) and loading.runs("onebit_compress_", x):
        found: tuple[torch.Tensor, torch.Tensor] = torch.ops.zoo.onebit_compress_.default(x, error, group_size)
        return found
    check_flat(x, "x", x.numel(), DTYPES, x)
    check_flat(error, "error", x.numel(), (torch.float32,), x)
    _check_group(group_size)
    return reference.compress_(x, error, group_size)


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
    if one_device(out, bits, scales) and loading.runs("onebit_decompress_", out):
        torch.ops.zoo.onebit_decompress_.default(out, bits, scales, group_size, add)
        return
    check_flat(out, "out", out.numel(), DTYPES, out)
    _check_group(group_size)
    check_flat(bits, "bits", -(-out.numel() // 8), (torch.uint8,), out)
    check_flat(scales, "scales", -(-out.numel() // group_size), (torch.float32,), out)
    reference.decompress_(out, bits, scales, group_size, add)


def _check_group(group_size: int) -> None:
    if not UNIT <= group_size <= LARGEST or group_size % UNIT:
        raise ValueError(f"group_size={group_size}; it must be a multiple of {UNIT} from {UNIT} to {LARGEST}.")
