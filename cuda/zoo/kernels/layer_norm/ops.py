"""Layer normalisation as a function of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zoo.kernels.checks import check_input, check_like
from zoo.kernels.differentiable import call, native, reference_function
from zoo.kernels.layer_norm import reference, registration

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
    name = "layer_norm" if residual is None else "add_layer_norm"
    if native(x, name):
        first = (x,) if residual is None else (x, residual)
        found = call(name, (*first, weight, bias, eps), lambda: _check(x, weight, bias, eps, residual))
    else:
        _check(x, weight, bias, eps, residual)
        found = _plain(x, weight, bias, eps) if residual is None else _add(x, residual, weight, bias, eps)
    return LayerNorm(found[0], x, *found[1:]) if residual is None else LayerNorm(*found)


def layer_norm_backward(
    grad_y: Tensor, grad_sum: Tensor | None, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db) from dy, and ds where the sum went on; ``total`` is s. The gradient of a residual is dx."""
    args = (grad_y, grad_sum, total, weight, mean, rstd)
    if native(total, "layer_norm_backward"):
        found: tuple[Tensor, Tensor, Tensor] = call("layer_norm_backward", args, lambda: _check_backward(*args))
        return found
    _check_backward(*args)
    return reference.layer_norm_backward(*args)


_plain = reference_function(reference.layer_norm, registration.setup_context, registration.backward)
_add = reference_function(reference.add_layer_norm, registration.add_setup_context, registration.add_backward)


def _check(x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None) -> None:
    _check_rows("x", x)
    check_input("weight", weight)
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
    check_like("weight", weight, total.shape[-1:], total, weight.dtype)
    stats = torch.promote_types(total.dtype, torch.float32)
    check_like("mean", mean, total.shape[:-1], total, stats)
    check_like("rstd", rstd, total.shape[:-1], total, stats)
