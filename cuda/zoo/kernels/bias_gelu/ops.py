"""Bias and GELU as functions of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.bias_gelu import reference
from zoo.kernels.checks import check_input, check_like
from zoo.kernels.operators import Operator

Tensor = torch.Tensor


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none") -> Tensor:
    """y = z·Φ(z), z = x + bias (Hendrycks and Gimpel 2016, section 2); differentiable, once.

    Args:
        x: (..., D), contiguous, fp32, bf16 or fp16 (fp64 runs in the reference).
        bias: (D,), fp32, bf16 or fp16.
        approximate: ``"none"``, Φ itself, or ``"tanh"``, Φ(z) ≈ (1 + tanh(√(2/π)·(z + 0.044715·z³)))/2, as in torch.

    Returns:
        (..., D), of the dtype of x.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be, or another ``approximate``; with the numbers.
    """
    tanh = _is_tanh(approximate)
    y: Tensor = _forward(x, bias, tanh, check=lambda: _check(x, bias))
    return y


def bias_gelu_backward(grad_y: Tensor, x: Tensor, bias: Tensor, *, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """(dx, db) from dy, for the x and bias of the forward."""
    tanh = _is_tanh(approximate)

    def check() -> None:
        _check(x, bias)
        check_like("grad_y", grad_y, x.shape, x)

    grads: tuple[Tensor, Tensor] = _backward(grad_y, x, bias, tanh, check=check, of=1)
    return grads


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.approximate = "tanh" if inputs[2] else "none"


def _gradient(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    return (*bias_gelu_backward(grad_y.contiguous(), *ctx.saved_tensors, approximate=ctx.approximate), None)


_forward = Operator(
    "bias_gelu", reference.bias_gelu, fake=lambda x, *_: torch.empty_like(x), gradient=(_keep, _gradient)
)
_backward = Operator(
    "bias_gelu_backward", reference.bias_gelu_backward,
    fake=lambda dy, x, bias, tanh: (torch.empty_like(x), torch.empty_like(bias)),
)  # fmt: skip


def _is_tanh(approximate: str) -> bool:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}; it must be 'none' or 'tanh'.")
    return approximate == "tanh"


def _check(x: Tensor, bias: Tensor) -> None:
    check_input("x", x)
    check_input("bias", bias, like=x)
    check_like("bias", bias, x.shape[-1:], x, bias.dtype)
