"""A batch-invariant linear layer in plain torch, with the bits of the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zoo.kernels.elementary import wide

Tensor = torch.Tensor
LANES = 16
ELEMENTS = 1 << 22
"""Of the lanes of the sums that are worked on together."""


def thin_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """See :func:`zoo.kernels.thin_linear.thin_linear`."""
    tokens = wide(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    found = []
    for i, weight in enumerate(weights):
        rows = wide(weight)
        y = tokens.new_empty(len(tokens), len(rows))
        each = max(1, ELEMENTS // (LANES * max(1, len(rows))))
        for begin in range(0, len(tokens), each):
            y[begin : begin + each] = product(tokens[begin : begin + each], rows)
        found.append(y + biases[i].to(y.dtype) if biases else y)
    together = torch.cat(found, 1) if found else tokens.new_empty(len(tokens), 0)
    return together.to(x.dtype).view(*x.shape[:-1], together.shape[1])


def product(x: Tensor, weight: Tensor) -> Tensor:
    """(M, N): product k goes into lane k mod 16, then the lanes are folded by halves."""
    columns = x.shape[1]
    pad = (0, -columns % LANES)
    x, weight = (torch.nn.functional.pad(t, pad).view(len(t), math.ceil(columns / LANES), LANES) for t in (x, weight))
    lanes = x.new_zeros(x.shape[0], weight.shape[0], LANES)
    for k in range(x.shape[1]):
        lanes = multiply_add(x[:, None, k], weight[None, :, k], lanes)
    half = LANES // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half:]
        half //= 2
    return lanes[..., 0]


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a·b + c, fp32, rounded once (fp64: twice).

    The product is exact in fp64. The sum is rounded to odd there, after which a second rounding, to a format that is
    shorter by two bits or more, is as one alone (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded
    sums", section 3).
    """
    if c.dtype is torch.float64:
        return a * b + c
    product, other = a.double() * b.double(), c.double()
    total = product + other
    back = total - product
    error = (product - (total - back)) + (other - back)
    even = (total.view(torch.int64) & 1) == 0
    wrong = (error != 0) & error.isfinite() & even
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(total.dtype)
    return torch.where(wrong, torch.nextafter(total, towards), total).float()
