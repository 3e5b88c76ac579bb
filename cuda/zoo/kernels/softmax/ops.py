"""Softmax as functions of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.checks import check_floating, check_input, check_like
from zoo.kernels.operators import Operator
from zoo.kernels.softmax import reference

Tensor = torch.Tensor
MAX_DIMS = 8


def softmax(x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """y = softmax(scale·x + mask) over the last dim, the keys (Vaswani et al. 2017, section 3.2.1).

    A query that may see no key gets zeros, not NaN; one that sees a NaN or +inf gets NaN at all keys, as in torch.
    Differentiable, once.

    Args:
        x: scores (..., Q, K), 2 to 8 dims, contiguous, fp32, bf16 or fp16 (fp64 runs in the reference).
        scale: often 1/√(head dim).
        mask: added to the scores, -inf for keys that must not be seen; fp32, bf16 or fp16, of a shape that broadcasts
            to that of x. It may need a gradient (a learned bias of positions).
        causal: query q sees keys k <= q + (K - Q): the last query sees all of them.

    Returns:
        (..., Q, K), of the dtype of x.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be; with the numbers.
    """
    wanted = _expanded(mask, x) if mask is not None else None
    y: Tensor = _forward(x, wanted, scale, causal, check=lambda: _check(x, wanted))
    return y


def softmax_backward(grad_y: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    """dx = scale·(y·(dy - Σ dy·y)) from the result y of the forward."""

    def check() -> None:
        _check(y, None, "y")
        check_like("grad_y", grad_y, y.shape, y)

    grad_x: Tensor = _backward(grad_y, y, scale, check=check, of=1)
    return grad_x


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, ctx.scale, _ = inputs
    ctx.mask_dtype = None if mask is None else mask.dtype
    ctx.save_for_backward(output)


def _gradient(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    # That of a mask which was broadcast is summed by autograd, which knows how it was.
    (y,) = ctx.saved_tensors
    dy = grad_y.contiguous()
    dx = softmax_backward(dy, y, scale=ctx.scale) if ctx.needs_input_grad[0] else None
    if ctx.mask_dtype is None or not ctx.needs_input_grad[1]:
        return dx, None, None, None
    return dx, softmax_backward(dy, y, scale=1.0).to(ctx.mask_dtype), None, None


_forward = Operator("softmax", reference.softmax, fake=lambda x, *_: torch.empty_like(x), gradient=(_keep, _gradient))
_backward = Operator("softmax_backward", reference.softmax_backward, fake=lambda dy, y, scale: torch.empty_like(y))


def _expanded(mask: Tensor, x: Tensor) -> Tensor:
    # Broadcast by strides, without a copy; only the rows themselves must be there.
    try:
        if mask.layout is torch.strided and mask.dim() and x.dim() and mask.shape[-1] == 1 != x.shape[-1]:
            mask = mask.expand(*mask.shape[:-1], x.shape[-1]).contiguous()
        elif mask.layout is torch.strided and mask.dim() and mask.stride(-1) != 1:
            mask = mask.contiguous()
        return mask.expand(x.shape)
    except RuntimeError as error:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, which does not broadcast to {tuple(x.shape)}, the shape of x."
        ) from error


def _check(x: Tensor, mask: Tensor | None, what: str = "x") -> None:
    check_input(what, x)
    if not 2 <= x.dim() <= MAX_DIMS:
        raise ValueError(f"{what} has shape {tuple(x.shape)}; it must have 2 to {MAX_DIMS} dims.")
    if mask is not None:
        check_floating("mask", mask, x)
        if mask.device != x.device:
            raise ValueError(f"mask is on {mask.device}; all tensors of a call must be on one device, here {x.device}.")
