"""Linear layers on packed weights as functions of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from zoo.kernels.checks import check_flat, check_floating, check_like
from zoo.kernels.operators import Operator
from zoo.kernels.packed_linear import reference
from zoo.kernels.packed_linear.packing import PackedWeight

Tensor = torch.Tensor
Activations = Literal["exact", "int8"]
"""How x is multiplied: as it is, or rounded to 8 bits in blocks of 32."""


def packed_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, activations: Activations = "exact"
) -> Tensor:  # fmt: skip
    """y = x·Wᵀ + b with W = q·s (+ lo), sums in fp32; differentiable, once, in x and b. W has no gradient.

    Few tokens are multiplied by the codes themselves, many by tiles of W as numbers where that is the faster way:
    ``packed_linear.h`` says what is rounded when.

    Args:
        x: (..., K), of any strides, fp32, bf16 or fp16 (fp64 runs in the reference).
        weight: of :func:`pack_weight` or :func:`pack`, (N, K).
        bias: (N,), fp32, bf16 or fp16.
        activations: "int8": x is rounded to 8 bits in blocks of 32, which changes y by more than rounding does, and
            products are those of integers: ``int8_activations.h``. A row of y has the same bits among any other rows,
            on each instruction set. The gradient of x is the one without.

    Returns:
        (..., N), of the dtype of x.

    Raises:
        ValueError: a dtype, shape or device that cannot be; scales or minima that require a gradient; other
            activations.
    """
    int8 = is_int8(activations)
    q, scales, minima, (rows, columns), bits, group_size = weight
    if x.dim() == 0 or x.shape[-1] != columns:
        raise ValueError(f"x has shape {tuple(x.shape)}; for W of shape {weight.shape} its last dim must be {columns}.")
    if scales.requires_grad or (minima is not None and minima.requires_grad):
        raise ValueError("scales or minima require a gradient; a packed weight has none: pass .detach().")
    y: Tensor = _forward(
        x, q, scales, minima, bias, rows, bits, group_size, int8, check=lambda: _check(x, "x", weight, bias)
    )
    return y


def is_int8(activations: str) -> bool:
    """Whether x is rounded to 8 bits.

    Raises:
        ValueError: the word is none of :data:`Activations`.
    """
    if activations not in get_args(Activations):
        raise ValueError(f"activations={activations!r}; allowed are {' and '.join(map(repr, get_args(Activations)))}.")
    return activations == "int8"


def packed_linear_backward(grad_y: Tensor, weight: PackedWeight) -> Tensor:
    """dx = dy·W, (..., K), of the dtype of dy (..., N)."""
    q, scales, minima, (rows, columns), bits, group_size = weight
    if grad_y.dim() == 0 or grad_y.shape[-1] != rows:
        raise ValueError(
            f"grad_y has shape {tuple(grad_y.shape)}; for W of shape {weight.shape} its last dim must be {rows}."
        )
    grad_x: Tensor = _backward(
        grad_y, q, scales, minima, columns, bits, group_size, check=lambda: _check(grad_y, "grad_y", weight, None)
    )
    return grad_x


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, q, scales, minima, bias, rows, bits, group_size, _ = inputs
    ctx.save_for_backward(q, scales, minima)
    ctx.how = (rows, x.shape[-1]), bits, group_size
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradient(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = packed_linear_backward(grad_y, PackedWeight(*ctx.saved_tensors, *ctx.how))
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        sums = torch.promote_types(torch.float32, grad_y.dtype)
        grad_bias = grad_y.flatten(0, -2).sum(0, dtype=sums) if grad_y.dim() > 1 else grad_y
        grad_bias = grad_bias.to(ctx.bias_dtype)
    return grad_x, None, None, None, grad_bias, None, None, None, None


_forward = Operator(
    "packed_linear", reference.packed_linear,
    fake=lambda x, q, scales, minima, bias, rows, *_: x.new_empty((*x.shape[:-1], rows)), gradient=(_keep, _gradient),
)  # fmt: skip
_backward = Operator(
    "packed_linear_backward", reference.packed_linear_backward,
    fake=lambda grad_y, q, scales, minima, columns, *_: grad_y.new_empty((*grad_y.shape[:-1], columns)),
)  # fmt: skip


def _check(t: Tensor, name: str, weight: PackedWeight, bias: Tensor | None) -> None:
    check_floating(name, t)
    q, scales, minima, (rows, columns), bits, group_size = weight
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}; it must be 8 or 4.")
    if group_size < 16 or group_size % 16 or columns % group_size:
        raise ValueError(
            f"group_size={group_size} for rows of {columns} elements; it must be a multiple of 16 that divides them."
        )
    check_flat(q, "q", rows * columns * bits // 8, (torch.int8 if minima is None else torch.uint8,), t)
    for what, found in (("scales", scales), ("minima", minima)):
        if found is not None:
            check_flat(found, what, rows * (columns // group_size), (torch.float32,), t)
    if bias is not None:
        check_floating("bias", bias, t)
        check_like("bias", bias, (rows,), t, bias.dtype)
