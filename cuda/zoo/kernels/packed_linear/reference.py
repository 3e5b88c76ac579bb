"""Linear layers on packed weights in plain torch: W is dequantised, the products are made in fp32."""

from __future__ import annotations

import torch

from zoo.kernels.elementary import wide
from zoo.kernels.packed_linear.packing import PackedWeight, unpack_weight

Tensor = torch.Tensor


def packed_linear(
    x: Tensor, q: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, rows: int, bits: int,
    group_size: int,
) -> Tensor:  # fmt: skip
    """See :func:`zoo.kernels.packed_linear.packed_linear`."""
    weight = unpack_weight(PackedWeight(q, scales, minima, (rows, x.shape[-1]), bits, group_size))
    y = wide(x) @ weight.to(wide(x).dtype).t()
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def packed_linear_backward(
    grad_y: Tensor, q: Tensor, scales: Tensor, minima: Tensor | None, columns: int, bits: int, group_size: int
) -> Tensor:
    """dx."""
    weight = unpack_weight(PackedWeight(q, scales, minima, (grad_y.shape[-1], columns), bits, group_size))
    return (wide(grad_y) @ weight.to(wide(grad_y).dtype)).to(grad_y.dtype)
