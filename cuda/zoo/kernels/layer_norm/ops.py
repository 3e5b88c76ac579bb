"""Layer normalisation as a function of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from zoo.kernels.checks import check_input, check_like
from zoo.kernels.layer_norm import reference
from zoo.kernels.operators import Operator

Tensor = torch.Tensor


class LayerNorm(NamedTuple):
    """What :func:`layer_norm` returns."""

    y: Tensor
    """(..., D), of the dtype of x."""
    sum: Tensor
    """(..., D): x + residual, rounded to the dtype of x; x itself without a residual."""
    mean: Tensor
    """(...), fp32, without gradient."""
    rstd: Tensor
    """1/√(variance + eps): (...), fp32, without gradient."""


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5, residual: Tensor | None = None
) -> LayerNorm:
    """y = (s - μ)·ρ·w + b with s = x + residual, μ = mean of s, ρ = 1/√(mean of (s - μ)² + ε), over the last dim.

    Ba, Kiros and Hinton 2016, equation 4; ``layer_norm.h`` has the order of the operations and the gradient.
    Differentiable, once, in x, residual, weight and bias.

    Args:
        x: (..., D), contiguous, fp32, bf16 or fp16 (fp64 runs in the reference); D >= 1.
        weight: w, (D,); fp32, bf16 or fp16, not necessarily that of x.
        bias: b, like ``weight``.
        eps: ε, not negative.
        residual: like x.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be; with the numbers.
    """

    def check() -> None:
        _check(x, weight, bias, eps, residual)

    if residual is not None:
        return LayerNorm(*_forward_of_sum(x, residual, weight, bias, eps, check=check))
    y, mean, rstd = _forward(x, weight, bias, eps, check=check)
    return LayerNorm(y, x, mean, rstd)


def layer_norm_backward(
    grad_y: Tensor, grad_sum: Tensor | None, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db) from dy, and ds where the sum went on; ``total`` is s. The gradient of a residual is dx."""
    args = (grad_y, grad_sum, total, weight, mean, rstd)
    grads: tuple[Tensor, Tensor, Tensor] = _backward(*args, check=lambda: _check_backward(*args), of=2)
    return grads


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight = inputs[:2]
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, mean, rstd)


def _gradient(ctx: Any, grad_y: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (*layer_norm_backward(grad_y.contiguous(), None, *ctx.saved_tensors), None)


def _keep_of_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(total, inputs[2], mean, rstd)


def _gradient_of_sum(ctx: Any, grad_y: Tensor, grad_sum: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dw, db = layer_norm_backward(grad_y.contiguous(), grad_sum.contiguous(), *ctx.saved_tensors)
    return dx, dx, dw, db, None


def _fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    stats = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return torch.empty_like(x), stats, torch.empty_like(stats)


def _fake_of_sum(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, mean, rstd = _fake(x)
    return y, torch.empty_like(x), mean, rstd


def _fake_backward(
    grad_y: Tensor, grad_sum: Tensor | None, total: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(total), torch.empty_like(weight), torch.empty_like(weight)


_forward = Operator("layer_norm", reference.layer_norm, fake=_fake, gradient=(_keep, _gradient))
_forward_of_sum = Operator(
    "add_layer_norm", reference.add_layer_norm, fake=_fake_of_sum, gradient=(_keep_of_sum, _gradient_of_sum)
)
_backward = Operator("layer_norm_backward", reference.layer_norm_backward, fake=_fake_backward)


def _check(x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None) -> None:
    _check_rows("x", x)
    check_input("weight", weight, like=x)
    check_like("weight", weight, x.shape[-1:], x, weight.dtype)
    check_like("bias", bias, x.shape[-1:], x, weight.dtype)
    if not eps >= 0:
        raise ValueError(f"eps is {eps}; it must not be negative.")
    if residual is not None:
        check_like("residual", residual, x.shape, x)


def _check_rows(what: str, x: Tensor) -> None:
    check_input(what, x)
    if x.shape[-1] < 1:
        raise ValueError(f"{what} has shape {tuple(x.shape)}; its last dim must be at least 1.")


def _check_backward(
    grad_y: Tensor, grad_sum: Tensor | None, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> None:
    _check_rows("sum", total)
    check_like("grad_y", grad_y, total.shape, total)
    if grad_sum is not None:
        check_like("grad_sum", grad_sum, total.shape, total)
    check_input("weight", weight, like=total)
    check_like("weight", weight, total.shape[-1:], total, weight.dtype)
    stats = torch.promote_types(total.dtype, torch.float32)
    check_like("mean", mean, total.shape[:-1], total, stats)
    check_like("rstd", rstd, total.shape[:-1], total, stats)
