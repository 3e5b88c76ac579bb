"""What torch is told about softmax: fake kernels and the gradient."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.differentiable import register_fake

Tensor = torch.Tensor


def register() -> None:
    """Called once, after the library is loaded."""
    register_fake("zoo::softmax", lambda x, mask, scale, causal: torch.empty_like(x))
    register_fake("zoo::softmax_backward", lambda grad_y, y, scale: torch.empty_like(y))
    torch.library.register_autograd("zoo::softmax", backward, setup_context=setup_context)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keeps the result."""
    _, mask, ctx.scale, _ = inputs
    ctx.mask_dtype = None if mask is None else mask.dtype
    ctx.save_for_backward(output)


def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x and mask; that of a mask which was broadcast is summed by autograd, which knows how it was."""
    from zoo.kernels.softmax.ops import softmax_backward

    (y,) = ctx.saved_tensors
    dy = grad_y.contiguous()
    dx = softmax_backward(dy, y, scale=ctx.scale) if ctx.needs_input_grad[0] else None
    if ctx.mask_dtype is None or not ctx.needs_input_grad[1]:
        return dx, None, None, None
    return dx, softmax_backward(dy, y, scale=1.0).to(ctx.mask_dtype), None, None
