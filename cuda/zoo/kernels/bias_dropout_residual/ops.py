"""Bias, dropout and residual as functions of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.bias_dropout_residual import reference
from zoo.kernels.checks import check_input, check_like
from zoo.kernels.operators import Operator

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

    out: Tensor = _forward(x, bias, residual, *generator, check=check)
    return out


def bias_dropout_residual_backward(
    grad_out: Tensor, bias: Tensor, *, p: float, seed: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """(dx, db) from dy; dr is dy. ``bias`` gives db its dtype."""
    _check_p(p)
    generator = (p, _bits("seed", seed), _bits("offset", offset))
    grads: tuple[Tensor, Tensor] = _backward(
        grad_out, bias, *generator, check=lambda: _check("grad_out", grad_out, bias)
    )
    return grads


def dropout(x: Tensor, *, p: float, seed: int, offset: int = 0, first: int = 0) -> Tensor:
    """k·x, with the k of :func:`bias_dropout_residual` for the elements from place ``first`` on; differentiable, once.

    So the parts of a tensor get the parts of its mask: row by row, on one rank or on several. The gradient is k·dy.

    Args:
        x: (..., D), contiguous, fp32, bf16 or fp16 (fp64 runs in the reference).
        p, seed, offset: as there.
        first: the place of x's first element in what the mask is of, not negative.

    Raises:
        ValueError: a dtype, device or layout that cannot be, p, seed, offset or first out of range; with the numbers.
    """
    _check_p(p)
    generator = (p, _bits("seed", seed), _bits("offset", offset))
    if not 0 <= first < 2**63:
        raise ValueError(f"first is {first}; it must not be negative, nor take more than 63 bits.")
    out: Tensor = _alone(x, *generator, first, check=lambda: check_input("x", x))
    return out


def _keep_of_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.generator = inputs[1:]


def _gradient_of_dropout(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    p, seed, offset, first = ctx.generator
    dx = dropout(grad_out.contiguous(), p=p, seed=seed, offset=offset, first=first)
    return dx, None, None, None, None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])  # for its shape and dtype; the mask is computed again
    ctx.generator = inputs[3:]


def _gradient(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    p, seed, offset = ctx.generator
    dy = grad_out.contiguous()
    dx, db = bias_dropout_residual_backward(dy, *ctx.saved_tensors, p=p, seed=seed, offset=offset)
    return dx, db, dy, None, None, None


_forward = Operator(
    "bias_dropout_residual", reference.bias_dropout_residual, fake=lambda x, *_: torch.empty_like(x),
    gradient=(_keep, _gradient),
)  # fmt: skip
_alone = Operator(
    "dropout", reference.dropout, fake=lambda x, *_: torch.empty_like(x),
    gradient=(_keep_of_dropout, _gradient_of_dropout),
)  # fmt: skip
_backward = Operator(
    "bias_dropout_residual_backward", reference.bias_dropout_residual_backward,
    fake=lambda dy, bias, *_: (torch.empty_like(dy), torch.empty_like(bias)),
)  # fmt: skip


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
    check_input("bias", bias, like=x)
    check_like("bias", bias, x.shape[-1:], x, bias.dtype)
