"""Linear layers on packed weights in plain torch: W as fp32 numbers; with x in 8 bits, products of integers."""

from __future__ import annotations

import torch

from zoo.kernels.elementary import wide
from zoo.kernels.packed_linear.packing import PackedWeight, unpack, unpack_weight

Tensor = torch.Tensor
BLOCK = 32
"""Columns that share a scale of x."""


def packed_linear(
    x: Tensor, q: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, rows: int, bits: int,
    group_size: int, int8_activations: bool = False,
) -> Tensor:  # fmt: skip
    """See :func:`zoo.kernels.packed_linear.packed_linear`."""
    if int8_activations:
        packed = PackedWeight(q, scales, minima, (rows, x.shape[-1]), bits, group_size)
        y = _by_int8(wide(x).reshape(-1, x.shape[-1]), packed).view(*x.shape[:-1], rows)
        return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)
    weight = unpack_weight(PackedWeight(q, scales, minima, (rows, x.shape[-1]), bits, group_size))
    y = wide(x) @ weight.to(wide(x).dtype).t()
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def _by_int8(x: Tensor, weight: PackedWeight) -> Tensor:
    """y (M, N) of x (M, K) in 8 bits, each step rounded as ``int8_activations.h`` says."""
    (rows, columns), group = weight.shape, weight.group_size
    numbers = unpack(weight)
    codes = _codes(numbers[0], weight).to(x.dtype)
    scales, minima = (None if t is None else t.view(rows, columns // group).to(x.dtype) for t in numbers[1:])
    if scales is None:
        raise AssertionError("a packed weight without scales")
    y = x.new_zeros(len(x), rows)
    for g in range(columns // group):
        part, z = x.new_zeros(len(x), rows), x.new_zeros(len(x), 1)
        for begin in range(g * group, (g + 1) * group, BLOCK):
            cut = slice(begin, min(begin + BLOCK, (g + 1) * group))
            p, d = _in_8_bits(x[:, cut])
            part = part + d * (p @ codes[:, cut].t())  # products and sums of integers that fp32 has
            z = z + d * p.sum(1, keepdim=True)
        y = y + scales[:, g] * part
        if minima is not None:
            y = y + minima[:, g] * z
    return y


def _in_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """p and d of one block of each token."""
    most = x.abs().amax(1, keepdim=True)
    zero, bad = most < 2.0**-100, ~most.isfinite()
    limit = torch.full_like(most, 127.0)  # with a number torch may multiply by an inverse, which rounds twice
    p = torch.where(zero | bad, 0.0, torch.round(x * (limit / most)))
    return p, torch.where(zero, 0.0, torch.where(bad, most, most / limit))


def _codes(q: Tensor, weight: PackedWeight) -> Tensor:
    """(N, K), int16."""
    if weight.bits == 8:
        return q.view(weight.shape).short()
    both = q.view(torch.uint8).short()
    codes = torch.stack([both & 15, both >> 4], -1).view(weight.shape)
    return codes if weight.minima is not None else (codes ^ 8) - 8


def packed_linear_backward(
    grad_y: Tensor, q: Tensor, scales: Tensor, minima: Tensor | None, columns: int, bits: int, group_size: int
) -> Tensor:
    """dx."""
    weight = unpack_weight(PackedWeight(q, scales, minima, (grad_y.shape[-1], columns), bits, group_size))
    return (wide(grad_y) @ weight.to(wide(grad_y).dtype)).to(grad_y.dtype)
