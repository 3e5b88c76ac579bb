"""What torch is told about layer normalisation: fake kernels and gradients."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.differentiable import register_fake

Tensor = torch.Tensor


def register() -> None:
    """Called once, after the library is loaded."""
    register_fake("zoo::layer_norm", _fake)
    register_fake("zoo::add_layer_norm", _fake_add)
    register_fake("zoo::layer_norm_backward", _fake_backward)
    torch.library.register_autograd("zoo::layer_norm", backward, setup_context=setup_context)
    torch.library.register_autograd("zoo::add_layer_norm", add_backward, setup_context=add_setup_context)


def _fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    stats = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return torch.empty_like(x), stats, torch.empty_like(stats)


def _fake_add(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, mean, rstd = _fake(x, weight, bias, eps)
    return y, torch.empty_like(x), mean, rstd


def _fake_backward(
    grad_y: Tensor, grad_sum: Tensor | None, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(total), torch.empty_like(weight), torch.empty_like(weight)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps x, the weight and the statistics, which are without gradient."""
    x, weight = inputs[:2]
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, mean, rstd)


def backward(ctx: Any, grad_y: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias."""
    from zoo.kernels.layer_norm.ops import layer_norm_backward

    return (*layer_norm_backward(grad_y.contiguous(), None, *ctx.saved_tensors), None)


def add_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps the sum, the weight and the statistics."""
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(total, inputs[2], mean, rstd)


def add_backward(ctx: Any, grad_y: Tensor, grad_sum: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """Gradients of x, residual, weight, bias."""
    from zoo.kernels.layer_norm.ops import layer_norm_backward

    dx, dw, db = layer_norm_backward(grad_y.contiguous(), grad_sum.contiguous(), *ctx.saved_tensors)
    return dx, dx, dw, db, None
