"""Activations as functions of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

import torch

from zoo.kernels.activation import reference
from zoo.kernels.checks import check_input, check_like
from zoo.kernels.differentiable import call, native

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
    if native(a, "activate_"):
        call("activate_", (a, pre, activation, gated), lambda: _check(a, pre, activation, gated))
        return
    _check(a, pre, activation, gated)
    a.copy_(reference.activate(pre, activation, gated))


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

    if native(a, "activate_backward_"):
        call("activate_backward_", (a, grad_pre, grad_a, pre, activation, gated), check)
        return
    check()
    of_a, of_pre = reference.activate_backward(grad_a, pre, activation, gated)
    a.copy_(of_a)
    grad_pre.copy_(of_pre)


def _check(a: Tensor, pre: Tensor, activation: str, gated: bool) -> None:
    check_input("a", a)
    if activation not in FORMS:
        raise ValueError(f"activation is '{activation}'; it must be 'gelu', 'gelu_tanh', 'relu' or 'silu'.")
    check_like("pre", pre, (*a.shape[:-1], a.shape[-1] * (2 if gated else 1)), a)
