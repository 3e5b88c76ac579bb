"""A batch-invariant linear layer as a function of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from zoo.kernels import loading
from zoo.kernels.checks import NATIVE, check_floating, check_like
from zoo.kernels.operators import Operator, computes_alone
from zoo.kernels.thin_linear import reference

Tensor = torch.Tensor
_PLAIN = (Tensor, torch.nn.Parameter)
FEW = 16
"""Tokens up to which :func:`linear` takes :func:`thin_linear`."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``, by :func:`thin_linear` where that is the faster one and nobody needs more.

    That is: at most :data:`FEW` tokens on a CPU, contiguous weights of a dtype that there is a kernel for, no gradient,
    no autocast, trace or compiler. So a token has the same bits in every batch of up to :data:`FEW`, not beyond.

    Shapes, dtypes, errors: those of ``torch.nn.functional.linear``.
    """
    return thin_linear(x, weight, bias) if _is_thin(x, weight, bias) else F.linear(x, weight, bias)


def _is_thin(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        computes_alone()
        and type(x) is Tensor
        and type(weight) in _PLAIN
        and weight.layout is torch.strided
        and weight.device.type == "cpu"
        and weight.dtype in NATIVE
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and x.numel() <= FEW * weight.shape[1]
        and x.dtype is weight.dtype
        and (bias is None or (bias.dtype is weight.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and weight.is_contiguous()
        and loading.runs("thin_linear", weight)
    )


def thin_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x·Wᵀ + b; the bits of a row of y are a function of its row of x, of W and of b alone.

    A token that is generated alone has the bits of the same token in a prompt or in a larger batch, with any number of
    threads, on every instruction set and on CUDA. Sums are fp32, in the order that ``thin_linear.h`` gives. With one to
    16 tokens it is as fast as memory gives W away; with hundreds torch's product is the faster one. Differentiable
    once, in x, W and b, by torch's products.

    Args:
        x: (..., K), of any strides, fp32, bf16 or fp16 (fp64 runs in the reference).
        weight: of one linear layer, (N, K), contiguous, of the dtype of x.
        bias: (N,), fp32, bf16 or fp16.

    Returns:
        (..., N), of the dtype of x.

    Raises:
        ValueError: a dtype, shape or device that cannot be.
    """
    return thin_linears(x, [weight], [] if bias is None else [bias])


def thin_linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Tensor:
    """:func:`thin_linear` of several W on one x in one call, such as q, k and v: (..., ΣN), in their order.

    Args:
        biases: one for each weight, or none.
    """
    weights, biases = list(weights), list(biases)
    if weights and torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *biases)):
        _check(x, weights, biases)
        parts = [_differentiable(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    y: Tensor = _forward(x, weights, biases, check=lambda: _check(x, weights, biases))
    return y


def _differentiable(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = _Product.apply(x, weight, bias)
    return y


class _Product(torch.autograd.Function):
    """Of one weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return thin_linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        tokens = math.prod(x.shape[:-1])
        dy = grad_y.reshape(tokens, grad_y.shape[-1])
        grad_x = (dy @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = dy.t() @ x.reshape(tokens, x.shape[-1]) if ctx.needs_input_grad[1] else None
        grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = dy.sum(0, dtype=torch.promote_types(torch.float32, dy.dtype)).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


_forward = Operator(
    "thin_linear", reference.thin_linear,
    fake=lambda x, weights, biases: x.new_empty((*x.shape[:-1], sum(len(weight) for weight in weights))),
)  # fmt: skip


def _check(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> None:
    check_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x has no dims; it must have at least one.")
    if biases and len(biases) != len(weights):
        raise ValueError(f"there are {len(weights)} weights and {len(biases)} biases; give one for each, or none.")
    for i, weight in enumerate(weights):
        if weight.dim() != 2:
            raise ValueError(f"weights[{i}] has shape {tuple(weight.shape)}; it must have 2 dims.")
        check_like(f"weights[{i}]", weight, (weight.shape[0], x.shape[-1]), x, x.dtype)
        if biases:
            check_floating(f"biases[{i}]", biases[i], x)
            check_like(f"biases[{i}]", biases[i], (weight.shape[0],), x, biases[i].dtype)
