"""A linear map for each group of rows: one operation, also for compilers, without a readback of sizes on a GPU.

Legend: R rows, E groups; x (R, D), w (E, D, H), counts (E,): rows of each group, one group after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def grouped_linear(x: Tensor, w: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """y_i = x_i w_e + b_e for each row i of group e; (R, H). Rows after the last group are 0.

    On the CPU a loop of matrix products into one output; elsewhere ``torch.nn.functional.grouped_mm`` where it takes
    the dtype (it reads the sizes on the device), else the loop, which waits for the sizes. Can be differentiated any
    number of times: gradients are made of the same operations.

    Args:
        counts: (E,) int64, not negative, of a sum of at most R.
        bias: (E, H).
    """
    found: Tensor = torch.ops.zoo_moe.grouped_linear(x, w, counts, bias)
    return found


@torch.library.custom_op("zoo_moe::grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, w: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    if x.is_cuda and _grouped_mm_takes(x, w):
        which = _group_of_rows(counts, x.shape[0])
        y: Tensor = F.grouped_mm(x, w, offs=counts.cumsum(0, dtype=torch.int32))
        if bias is not None:
            y = y + torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[which]
        return torch.where((which < counts.numel()).unsqueeze(1), y, 0)  # after the last group memory is as it was
    y = x.new_empty(x.shape[0], w.shape[2])
    for e, begin, end in segments(counts):
        if bias is None:
            torch.mm(x[begin:end], w[e], out=y[begin:end])
        else:
            torch.addmm(bias[e], x[begin:end], w[e], out=y[begin:end])
    y[int(counts.sum()) :].zero_()
    return y


def segments(counts: Tensor) -> list[tuple[int, int, int]]:
    """(group, begin, end) of each group with rows."""
    found, end = [], 0
    for e, count in enumerate(counts.tolist()):
        if count:
            found.append((e, end, end + count))
        end += count
    return found


def _group_of_rows(counts: Tensor, num_rows: int) -> Tensor:
    """(R,): the group of each row, E after the last one."""
    return torch.searchsorted(counts.cumsum(0), torch.arange(num_rows, device=counts.device), right=True)


@torch.library.custom_op("zoo_moe::grouped_weight_grad", mutates_args=())
def _grouped_weight_grad(x: Tensor, dy: Tensor, counts: Tensor) -> Tensor:
    """dw_e = x_e^T dy_e, 0 for groups without rows; (E, D, H)."""
    if x.is_cuda and _grouped_mm_takes(x, dy):
        return F.grouped_mm(x.t(), dy, offs=counts.cumsum(0, dtype=torch.int32))
    dw = x.new_empty(counts.numel(), x.shape[1], dy.shape[1])
    for e, begin, end in segments(counts):
        torch.mm(x[begin:end].t(), dy[begin:end], out=dw[e])
    for e, count in enumerate(counts.tolist()):
        if not count:
            dw[e].zero_()
    return dw


@torch.library.custom_op("zoo_moe::grouped_sum", mutates_args=())
def _grouped_sum(dy: Tensor, counts: Tensor) -> Tensor:
    """db_e = Σ_i dy_i over the rows of group e; (E, H)."""
    if dy.is_cuda:
        which = _group_of_rows(counts, dy.shape[0])
        return dy.new_zeros(counts.numel() + 1, dy.shape[1]).index_add_(0, which, dy)[:-1].clone()
    db = dy.new_zeros(counts.numel(), dy.shape[1])
    for e, begin, end in segments(counts):
        torch.sum(dy[begin:end], 0, out=db[e])
    return db


def _grouped_mm_takes(x: Tensor, w: Tensor) -> bool:
    """bfloat16, rows of whole 16 bytes."""
    return (
        hasattr(F, "grouped_mm") and x.dtype is torch.bfloat16 and x.shape[-1] % 8 == 0 and w.shape[-1] % 8 == 0
    )  # fmt: skip


@_grouped_linear.register_fake
def _(x: Tensor, w: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@_grouped_weight_grad.register_fake
def _(x: Tensor, dy: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], x.shape[1], dy.shape[1])


@_grouped_sum.register_fake
def _(dy: Tensor, counts: Tensor) -> Tensor:
    return dy.new_empty(counts.shape[0], dy.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, counts = ctx.saved_tensors
    dy = dy.contiguous()
    dx = grouped_linear(dy, w.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
    dw = _weight_grad(x, dy, counts, w) if ctx.needs_input_grad[1] else None
    db = torch.ops.zoo_moe.grouped_sum(dy, counts) if ctx.needs_input_grad[3] else None
    return dx, dw, None, db


def _weight_grad(x: Tensor, dy: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """As ``w`` lies: where that is a transposed view of an (E, H, D) parameter, its gradient needs no copy."""
    if w.stride(2) != 1 and w.stride(1) == 1:
        found: Tensor = torch.ops.zoo_moe.grouped_weight_grad(dy, x, counts).transpose(1, 2)
    else:
        found = torch.ops.zoo_moe.grouped_weight_grad(x, dy, counts)
    return found


def _weight_grad_backward(ctx: Any, ddw: Tensor) -> tuple[Tensor | None, ...]:
    x, dy, counts = ctx.saved_tensors
    dx = grouped_linear(dy, ddw.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
    ddy = grouped_linear(x, ddw, counts) if ctx.needs_input_grad[1] else None
    return dx, ddy, None


def _sum_backward(ctx: Any, ddb: Tensor) -> tuple[Tensor | None, ...]:
    dy, counts = ctx.saved_tensors
    spread = torch.cat([ddb, ddb.new_zeros(1, ddb.shape[1])])[_group_of_rows(counts, dy.shape[0])]
    return spread, None


_grouped_linear.register_autograd(_linear_backward, setup_context=_save)
_grouped_weight_grad.register_autograd(_weight_grad_backward, setup_context=_save)
_grouped_sum.register_autograd(_sum_backward, setup_context=_save)
