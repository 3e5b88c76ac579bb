"""Gating as functions of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from zoo.kernels.checks import check_floating, check_input, check_like
from zoo.kernels.gating import reference
from zoo.kernels.operators import Operator

Tensor = torch.Tensor
Priority = Literal["choice", "token"] | torch.Tensor


class Gate(NamedTuple):
    """What :func:`top_k_gate` returns, in the order of :func:`torch.topk`."""

    probabilities: Tensor
    """The weights of the chosen experts, the greatest first: (T, k), fp32 (fp64 for fp64 logits)."""
    indices: Tensor
    """Which they are: (T, k), int64."""


class Positions(NamedTuple):
    """What :func:`positions_in_expert` returns; all int64."""

    positions: Tensor
    """(T, k): 0, 1, ... within each expert in the order of priority; -1 from the capacity on, for what is dropped."""
    counts: Tensor
    """(E,): assignments that each expert keeps. They sum to T·k less the number dropped."""
    demand: Tensor
    """(E,): assignments to each expert, dropped ones too."""
    capacity: int | None
    """As it was given."""


def top_k_gate(logits: Tensor, k: int, *, renormalise: bool = False) -> Gate:
    """The k most probable experts of each token, and p = softmax(logits) over all E of them at these k.

    Shazeer et al. 2017, section 2.1; Fedus et al. 2022, section 2.1. ``renormalise`` divides by the sum of the k, which
    is the softmax over the chosen alone: weights that sum to 1. Of equal logits the lower index comes first. A NaN is
    greater than everything (as in torch.topk), so indices are always k different experts; the probabilities of a token
    with a NaN or +inf are NaN. With all logits -inf they are 0; an expert at -inf is chosen last and gets 0.
    Differentiable, once, in the probabilities; ``gating.h`` has the order of the operations.

    Args:
        logits: (T, E), contiguous, fp32, bf16 or fp16 (fp64 runs in the reference); computed in fp32.
        k: 1 <= k <= E.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be, or such a k; with the numbers.
    """
    found = _gate(logits, k, renormalise, check=lambda: _check_gate(logits, k))
    return Gate(*found)


def top_k_gate_backward(
    grad_probabilities: Tensor, logits: Tensor, indices: Tensor, *, renormalise: bool = False
) -> Tensor:
    """dv = p·(g - Σ_j dw_j·w_j): g_e = dw_j at the expert that indices_j names, else 0; p renormalised as w is.

    An index of no expert is a ValueError on the CPU. The CUDA kernel does not wait for the GPU to find it: the gradient
    of its token is NaN.
    """

    def check() -> None:
        _check_matrix("logits", logits)
        _check_assignments("indices", indices, 0, logits.shape[1], "the number of experts", logits)
        if indices.shape[0] != logits.shape[0] or indices.shape[1] > logits.shape[1]:
            tokens, experts = logits.shape
            raise ValueError(f"indices has shape {tuple(indices.shape)}; it must be ({tokens}, at most {experts}).")
        wide = torch.promote_types(logits.dtype, torch.float32)
        check_like("grad_probabilities", grad_probabilities, indices.shape, logits, wide)

    found: Tensor = _gate_backward(grad_probabilities, logits, indices, renormalise, check=check, of=1)
    return found


def positions_in_expert(
    indices: Tensor, num_experts: int, *, capacity: int | None = None, priority: Priority = "choice"
) -> Positions:
    """The place of each assignment among those to the same expert, and how many each expert gets.

    Lepikhin et al. 2021 (GShard), algorithm 1. An integer count in a fixed order: any number of threads and CUDA agree.

    Args:
        indices: (T, k), contiguous, int64, in [0, num_experts).
        num_experts: E.
        capacity: how many an expert keeps; the others are dropped: position -1. None: all.
        priority: ``"choice"`` serves all first choices before any second one, as GShard does; ``"token"`` all choices
            of a token before those of the next. Or a key, (T, k), contiguous, fp32, bf16 or fp16 (fp64 runs in the
            reference): a full expert keeps the assignments of greatest keys, of equal ones the earlier in the order of
            tokens, and these have their places in that order. A NaN is the greatest key. Without a gradient.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be, an index or option out of range; with the numbers.
            The CUDA kernel does not wait for the GPU to find an index out of range: its position is -1, and it is in no
            demand, so that the demand sums to less than T·k.
    """
    key = priority.detach() if isinstance(priority, torch.Tensor) else None
    if key is None and priority not in ("choice", "token"):
        raise ValueError(f"priority is {priority!r}; it must be 'choice', 'token' or a tensor of keys.")

    def check() -> None:
        if num_experts < 1:
            raise ValueError(f"num_experts is {num_experts}; it must be at least 1.")
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity is {capacity}; it must not be negative.")
        _check_assignments("indices", indices, 0, num_experts, "the number of experts", indices)
        if key is not None:
            check_input("priority", key)
            check_like("priority", key, indices.shape, indices, key.dtype)

    args = (indices, num_experts, capacity, key is None and priority == "choice", key)
    main = 0 if key is None else 4  # the key, whose dtype decides
    positions, counts, demand = _positions(*args, check=check, of=main)
    return Positions(positions, counts, demand, capacity)


def expert_rows(indices: Tensor, at: Positions, *, padded: bool = False) -> Tensor:
    """Rows for :func:`permute` that group tokens by expert: first_e + position, -1 where dropped; (T, k), int64.

    Packed, first_e = Σ of the counts of the experts before e, so that the groups follow each other and take Σ counts
    rows, T·k at most. ``padded``, first_e = e·capacity: E·capacity rows, each expert's at the beginning of its share.

    Raises:
        ValueError: ``padded`` without a capacity, or positions of other indices.
    """
    if indices.shape != at.positions.shape:
        raise ValueError(
            f"indices has shape {tuple(indices.shape)}; the positions have {tuple(at.positions.shape)}: they must be "
            "those of these indices."
        )
    if padded and at.capacity is None:
        raise ValueError("padded is True, but the positions have no capacity; give positions_in_expert one.")
    if padded and at.capacity is not None:
        first = torch.arange(len(at.counts), device=indices.device) * at.capacity
    else:
        first = at.counts.cumsum(0) - at.counts
    # On CUDA an index of no expert is not refused: it has no place, and must not be looked up.
    return torch.where(at.positions >= 0, first[indices.clamp(0, len(first) - 1)] + at.positions, -1)


def permute(x: Tensor, rows: Tensor, *, num_rows: int | None = None) -> Tensor:
    """y[rows[t, j]] = x[t]: tokens grouped by expert. Rows that no assignment has are 0.

    Gale et al. 2023, section 5.2. Copies bits. Differentiable, once: the gradient is :func:`unpermute` without weights.

    Args:
        x: (T, D), contiguous, fp32, bf16 or fp16 (fp64 runs in the reference).
        rows: (T, k), contiguous, int64, all different, in [0, num_rows); -1 for what is dropped. :func:`expert_rows`
            makes them.
        num_rows: R, T·k if not given; E·capacity for padded rows.

    Returns:
        (R, D), of the dtype of x.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be, a row out of range or taken twice; with the
            numbers. The CUDA kernel does not wait for the GPU to find such rows: one out of range is as -1 is, with a
            gradient of NaN; of several assignments with one row it has the token of the first.
    """
    count = rows.numel() if num_rows is None else num_rows

    def check() -> None:
        _check_matrix("x", x)
        if rows.dim() != 2 or rows.shape[0] != x.shape[0]:
            raise ValueError(
                f"rows has shape {tuple(rows.shape)}; it must be ({x.shape[0]}, k), as x has shape {tuple(x.shape)}."
            )
        _check_rows(rows, count, x)

    found: Tensor = _permute(x, rows, count, check=check)
    return found


def unpermute(y: Tensor, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """out[t] = Σ_j weights[t, j]·y[rows[t, j]] in the order of j, in fp32, over what was not dropped; else 0.

    Differentiable, once, in y and the weights.

    Args:
        y: (R, D), contiguous, fp32, bf16 or fp16 (fp64 runs in the reference).
        rows: as :func:`permute` got them.
        weights: (T, k), contiguous, fp32, bf16 or fp16; None: all 1.

    Returns:
        (T, D), of the dtype of y.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be, a row out of range; with the numbers. A row that is
            taken twice is refused by the backward. The CUDA kernels do not wait for the GPU to find such rows: with one
            out of range out[t] is NaN; of several assignments with one row the first has the gradients, the others 0.
    """

    def check() -> None:
        _check_matrix("y", y)
        _check_assignments("rows", rows, -1, y.shape[0], "the number of rows", y)
        if weights is not None:
            _check_weights(weights, rows, y)

    found: Tensor = _unpermute(y, rows, weights, check=check)
    return found


def unpermute_backward(grad_out: Tensor, y: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(dy, dw): dy[rows[t, j]] = weights[t, j]·dout[t], other rows 0; dw[t, j] = Σ_d dout[t]·y[rows[t, j]]."""

    def check() -> None:
        _check_matrix("y", y)
        _check_rows(rows, y.shape[0], y)
        check_like("grad_out", grad_out, (rows.shape[0], y.shape[1]), y)
        _check_weights(weights, rows, y)

    found: tuple[Tensor, Tensor] = _unpermute_backward(grad_out, y, rows, weights, check=check, of=1)
    return found


def _keep_gate(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, ctx.renormalise = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _gate_gradient(ctx: Any, grad_probabilities: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    dw = grad_probabilities.contiguous()
    return top_k_gate_backward(dw, *ctx.saved_tensors, renormalise=ctx.renormalise), None, None


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _permute_gradient(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    return unpermute(grad_y.contiguous(), *ctx.saved_tensors), None, None


def _keep_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, rows, weights = inputs
    ctx.num_rows, ctx.weighted = y.shape[0], weights is not None
    ctx.save_for_backward(*((y, rows, weights) if ctx.weighted else (rows,)))


def _unpermute_gradient(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    g = grad_out.contiguous()
    if not ctx.weighted:
        return permute(g, *ctx.saved_tensors, num_rows=ctx.num_rows), None, None
    grad_y, grad_weights = unpermute_backward(g, *ctx.saved_tensors)
    return grad_y, None, grad_weights


def _fake_gate(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    indices = logits.new_empty((logits.shape[0], k), dtype=torch.int64)
    return torch.empty_like(indices, dtype=torch.float32), indices


def _fake_positions(indices: Tensor, num_experts: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(indices), indices.new_empty(num_experts), indices.new_empty(num_experts)


_gate = Operator("top_k_gate", reference.top_k_gate, fake=_fake_gate, gradient=(_keep_gate, _gate_gradient))
_gate_backward = Operator(
    "top_k_gate_backward", reference.top_k_gate_backward, fake=lambda dw, logits, *_: torch.empty_like(logits)
)
_positions = Operator("positions_in_expert", reference.positions_in_expert, fake=_fake_positions)
_permute = Operator(
    "permute", reference.permute, fake=lambda x, rows, num_rows: x.new_empty(num_rows, x.shape[1]),
    gradient=(_keep_rows, _permute_gradient),
)  # fmt: skip
_unpermute = Operator(
    "unpermute", reference.unpermute, fake=lambda y, rows, weights: y.new_empty(rows.shape[0], y.shape[1]),
    gradient=(_keep_weights, _unpermute_gradient),
)  # fmt: skip
_unpermute_backward = Operator(
    "unpermute_backward", reference.unpermute_backward,
    fake=lambda do, y, rows, weights: (torch.empty_like(y), torch.empty_like(weights)),
)  # fmt: skip


def _check_matrix(what: str, t: Tensor) -> None:
    check_input(what, t)
    if t.dim() != 2:
        raise ValueError(f"{what} has shape {tuple(t.shape)}; it must have 2 dims.")


def _check_gate(logits: Tensor, k: int) -> None:
    _check_matrix("logits", logits)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k is {k}; it must be between 1 and the number of experts, here {logits.shape[1]}.")


def _check_weights(weights: Tensor, rows: Tensor, y: Tensor) -> None:
    check_floating("weights", weights, y)
    check_like("weights", weights, rows.shape, y, weights.dtype)


def _check_assignments(what: str, t: Tensor, low: int, high: int, limit: str, like: Tensor) -> None:
    if t.dtype is not torch.int64:
        raise ValueError(f"{what} is {t.dtype}; it must be torch.int64.")
    if t.dim() != 2:
        raise ValueError(f"{what} has shape {tuple(t.shape)}; it must have 2 dims.")
    check_like(what, t, t.shape, like, torch.int64)
    outside = ((t < low) | (t >= high)).nonzero()
    if len(outside):
        i, j = outside[0].tolist()
        raise ValueError(
            f"{what}[{i}, {j}] is {int(t[i, j])}; it must be at least {low} and less than {limit}, here {high}."
        )


def _check_rows(rows: Tensor, num_rows: int, like: Tensor) -> None:
    if num_rows < 0:
        raise ValueError(f"num_rows is {num_rows}; it must not be negative.")
    _check_assignments("rows", rows, -1, num_rows, "the number of rows", like)
    flat = rows.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    again = (flat[order][1:] == flat[order][:-1]) & (flat[order][1:] >= 0)
    if bool(again.any()):
        at = int(order[1:][again].min())
        i, j = divmod(at, rows.shape[1])
        raise ValueError(
            f"rows[{i}, {j}] is {int(flat[at])}, which an assignment before it has already; each must have a row of "
            "its own."
        )
