"""Activations as functions of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

import torch

from zoo.kernels.activation import reference
from zoo.kernels.checks import check_input, check_like
from zoo.kernels.operators import Operator

Tensor = torch.Tensor

FORMS = ("gelu", "gelu_tanh", "relu", "silu")


def activate_(a: Tensor, pre: Tensor, activation: str, *, gated: bool = False) -> None:
    """a ← φ(p); gated, a ← φ(g) ⊙ u with (g, u) = p (Shazeer 2020). Not differentiable: it is for use in operations
    that have a backward of their own.

    Args:
        a: (..., H), contiguous, fp32, bf16 or fp16 (fp64 runs in the reference); overwritten.
        pre: p, (..., H), gated (..., 2H) with g first; contiguous, of the same dtype.
        activation: φ: ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or ``"silu"``.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be, or another ``activation``; with the numbers.
    """
    _forward(a, pre, activation, gated, check=lambda: _check(a, pre, activation, gated))


def activate_backward_(
    a: Tensor, grad_pre: Tensor, grad_a: Tensor, pre: Tensor, activation: str, *, gated: bool = False
) -> None:
    """``grad_pre`` ← dp = da ⊙ φ'(p); gated, (da ⊙ u ⊙ φ'(g), da ⊙ φ(g)); and a once more.

    Args:
        a, grad_pre: of the shapes of a and p; overwritten.
        grad_a: da. pre, activation, gated: of the forward.

    Raises:
        ValueError: as :func:`activate_`.
    """

    def check() -> None:
        _check(a, pre, activation, gated)
        check_like("grad_pre", grad_pre, pre.shape, a)
        check_like("grad_a", grad_a, a.shape, a)

    _backward(a, grad_pre, grad_a, pre, activation, gated, check=check)


def _write(a: Tensor, pre: Tensor, activation: str, gated: bool) -> None:
    a.copy_(reference.activate(pre, activation, gated))


def _write_backward(a: Tensor, grad_pre: Tensor, grad_a: Tensor, pre: Tensor, activation: str, gated: bool) -> None:
    for to, result in zip((a, grad_pre), reference.activate_backward(grad_a, pre, activation, gated), strict=True):
        to.copy_(result)


_forward = Operator("activate_", _write)
_backward = Operator("activate_backward_", _write_backward)


def _check(a: Tensor, pre: Tensor, activation: str, gated: bool) -> None:
    check_input("a", a)
    if activation not in FORMS:
        raise ValueError(f"activation is '{activation}'; it must be 'gelu', 'gelu_tanh', 'relu' or 'silu'.")
    check_like("pre", pre, (*a.shape[:-1], a.shape[-1] * (2 if gated else 1)), a)
