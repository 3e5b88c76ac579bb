"""Root mean square normalisation as a function of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.checks import check_input, check_like
from zoo.kernels.elementary import wide
from zoo.kernels.operators import Operator
from zoo.kernels.rms_norm import reference

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, plus_one: bool = False) -> Tensor:
    """y = (x·ρ)·w with ρ = 1/√(mean of x² + ε) over the last dim; a row of y depends on its row of x and on w alone.

    Zhang and Sennrich 2019, equation 4; ``rms_norm.h`` has the order of the operations and the gradient.
    Differentiable, once, in x and w.

    Args:
        x: (..., D), contiguous, fp32, bf16 or fp16 (fp64 runs in the reference); D >= 1.
        weight: w, (D,); fp32, bf16 or fp16, not necessarily that of x.
        eps: ε, not negative.
        plus_one: 1 + w in the place of w.

    Returns:
        (..., D), of the dtype of x.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be; with the numbers.
    """
    y: Tensor = _forward(x, weight, eps, plus_one, check=lambda: _check(x, weight, eps, None))
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """(:func:`rms_norm` of s, s) with s = x + residual, rounded to the dtype of x; ``residual`` is like x."""
    y, total = _forward_of_sum(
        x, residual, weight, eps, plus_one, check=lambda: _check(x, weight, eps, residual)
    )  # fmt: skip
    return y, total


def _gradients(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor]:
    """(ds of all, dw)."""
    grad, total, w = wide(dy), wide(s), wide(weight)
    rho = reference.root_of_mean(total, eps)
    hat, g = total * rho, grad * (1.0 + w if plus_one else w)
    found = rho * (g - hat * (g * hat).mean(-1, keepdim=True))
    if ds is not None:
        found = found + wide(ds)
    return found.to(s.dtype), (grad * hat).reshape(-1, s.shape[-1]).sum(0).to(weight.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps, ctx.plus_one = inputs
    ctx.save_for_backward(x, weight)


def _gradient(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return *_gradients(grad_y, None, x, weight, ctx.eps, ctx.plus_one), None, None


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, ctx.eps, ctx.plus_one = inputs
    ctx.save_for_backward(output[1], weight)


def _gradient_of_sum(ctx: Any, grad_y: Tensor, grad_sum: Tensor) -> tuple[Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    found, grad_weight = _gradients(grad_y, grad_sum, total, weight, ctx.eps, ctx.plus_one)
    return found, found, grad_weight, None, None


_forward = Operator("rms_norm", reference.rms_norm, fake=lambda x, *_: torch.empty_like(x), gradient=(_keep, _gradient))
_forward_of_sum = Operator(
    "add_rms_norm", reference.add_rms_norm, fake=lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
    gradient=(_keep_sum, _gradient_of_sum),
)  # fmt: skip


def _check(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> None:
    check_input("x", x)
    if x.shape[-1] < 1:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dim must be at least 1.")
    check_input("weight", weight, like=x)
    check_like("weight", weight, x.shape[-1:], x, weight.dtype)
    if residual is not None:
        check_like("residual", residual, x.shape, x)
    if not eps >= 0:
        raise ValueError(f"eps is {eps}; it must not be negative.")
