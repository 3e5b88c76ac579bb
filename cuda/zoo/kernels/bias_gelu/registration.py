"""What torch is told about bias and GELU: fake kernels and the gradient."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.differentiable import register_fake

Tensor = torch.Tensor


def register() -> None:
    """Called once, after the library is loaded."""
    register_fake("zoo::bias_gelu", lambda x, bias, tanh: torch.empty_like(x))
    register_fake("zoo::bias_gelu_backward", lambda dy, x, bias, tanh: (torch.empty_like(x), torch.empty_like(bias)))
    torch.library.register_autograd("zoo::bias_gelu", backward, setup_context=setup_context)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keeps x and the bias."""
    ctx.save_for_backward(*inputs[:2])
    ctx.tanh = inputs[2]


def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x and bias."""
    from zoo.kernels.bias_gelu.ops import bias_gelu_backward

    approximate = "tanh" if ctx.tanh else "none"
    return (*bias_gelu_backward(grad_y.contiguous(), *ctx.saved_tensors, approximate=approximate), None)
