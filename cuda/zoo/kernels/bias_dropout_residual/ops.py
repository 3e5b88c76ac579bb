"""Bias, dropout and residual as functions of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo.kernels.bias_dropout_residual import reference, registration
from zoo.kernels.checks import check_input, check_like
from zoo.kernels.differentiable import call, native, reference_function

Tensor = torch.Tensor


def bias_dropout_residual(
    x: Tensor, bias: Tensor, residual: Tensor, *, p: float, seed: int, offset: int = 0, training: bool = True
) -> Tensor:
    """residual + dropout(x + bias, p): element i is kept, divided by 1 - p, where word(i) >= p·2^32, else it is zero.

    word(i) is that of Philox4x32-10 (Salmon et al. 2011) for the counter (i / 4, offset) and the key seed, so the mask
    depends on the seed, the offset and the element's place alone: the same on CPU, CUDA and in the reference, in the
    forward and in the backward. Dropout as in Srivastava et al. 2014, inverted. Differentiable, once.

    Args:
        x: (..., D), contiguous, fp32, bf16 or fp16 (fp64 runs in the reference).
        bias: (D,), fp32, bf16 or fp16.
        residual: like x.
        p: the probability to drop, 0 <= p <= 1; 1 drops everything.
        seed: the key, of 64 bits: one for each run and rank that shall draw other numbers.
        offset: the upper half of the counter, of 64 bits: another one for each call (say step·layers + layer).
        training: False drops nothing and scales nothing: residual + (x + bias), whatever p is.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be, p, seed or offset out of range; with the numbers.
    """
    _check_p(p)
    generator = (p if training else 0.0, _bits("seed", seed), _bits("offset", offset))

    def check() -> None:
        _check("x", x, bias)
        check_like("residual", residual, x.shape, x)

    found: Tensor = _run(check, "bias_dropout_residual", _reference, x, bias, residual, *generator)
    return found


def bias_dropout_residual_backward(
    grad_out: Tensor, bias: Tensor, *, p: float, seed: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """(dx, db) from dy; dr is dy. ``bias`` gives db its dtype."""
    _check_p(p)
    generator = (p, _bits("seed", seed), _bits("offset", offset))
    found: tuple[Tensor, Tensor] = _run(
        lambda: _check("grad_out", grad_out, bias), "bias_dropout_residual_backward",
        reference.bias_dropout_residual_backward, grad_out, bias, *generator,
    )  # fmt: skip
    return found


_reference = reference_function(reference.bias_dropout_residual, registration.setup_context, registration.backward)


def _run(check: Callable[[], None], name: str, plain: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    if native(x, name):
        return call(name, (x, *rest), check)
    check()
    return plain(x, *rest)


def _bits(what: str, value: int) -> int:
    # As the schema takes it, a signed number: the same 64 bits.
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{what} is {value}; it must fit into 64 bits.")
    return value - 2**64 if value >= 2**63 else value


def _check_p(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p}; it must be between 0 and 1.")


def _check(what: str, x: Tensor, bias: Tensor) -> None:
    check_input(what, x)
    check_input("bias", bias)
    check_like("bias", bias, x.shape[-1:], x, bias.dtype)
