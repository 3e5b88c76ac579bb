"""What torch is told about bias, dropout and residual: fake kernels and the gradient."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.differentiable import register_fake

Tensor = torch.Tensor


def register() -> None:
    """Called once, after the library is loaded."""
    name = "zoo::bias_dropout_residual"
    register_fake(name, lambda x, bias, residual, p, seed, offset: torch.empty_like(x))
    register_fake(
        f"{name}_backward", lambda grad, bias, p, seed, offset: (torch.empty_like(grad), torch.empty_like(bias))
    )
    torch.library.register_autograd(name, backward, setup_context=setup_context)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keeps the bias, for its shape and dtype; the mask is computed again."""
    ctx.save_for_backward(inputs[1])
    ctx.generator = inputs[3:]


def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, bias and residual."""
    from zoo.kernels.bias_dropout_residual.ops import bias_dropout_residual_backward

    p, seed, offset = ctx.generator
    dy = grad_out.contiguous()
    dx, db = bias_dropout_residual_backward(dy, *ctx.saved_tensors, p=p, seed=seed, offset=offset)
    return dx, db, dy, None, None, None
