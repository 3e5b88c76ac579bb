"""Gating in plain torch, as ``gating.h`` writes it: oracle and fallback."""

from __future__ import annotations

import torch

from zoo.kernels.elementary import exp, wide
from zoo.kernels.sums import lane_sum

Tensor = torch.Tensor


def top_k_gate(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """(probabilities, indices)."""
    v = wide(logits)
    indices = torch.sort(v, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    e = _exponentials(v)
    return e.gather(-1, indices) * _inverse_sum(e, indices, renormalise), indices


def top_k_gate_backward(grad_probabilities: Tensor, logits: Tensor, indices: Tensor, renormalise: bool) -> Tensor:
    """dv."""
    e = _exponentials(wide(logits))
    inverse = _inverse_sum(e, indices, renormalise)
    dot = _sum_in_order(grad_probabilities * (e.gather(-1, indices) * inverse))
    if renormalise:
        chosen = torch.zeros_like(e, dtype=torch.bool).scatter_(-1, indices, True)
        e = torch.where(chosen, e, 0.0)
    g = torch.zeros_like(e)
    for j in range(indices.shape[1]):
        g.scatter_add_(-1, indices[:, j : j + 1], grad_probabilities[:, j : j + 1])
    return ((e * inverse) * (g - dot)).to(logits.dtype)


def positions_in_expert(
    indices: Tensor, num_experts: int, capacity: int | None, choices_first: bool, key: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(positions, counts, demand)."""
    tokens, choices = indices.shape
    sequence = (indices.t() if choices_first else indices).reshape(-1)
    demand = torch.bincount(sequence, minlength=num_experts)
    everyone = torch.arange(len(sequence), device=indices.device)
    places = _places(sequence, demand, everyone)
    if capacity is not None and key is None:
        places = torch.where(places < capacity, places, -1)
    if capacity is not None and key is not None:
        keys = (key.t() if choices_first else key).reshape(-1)
        by_key = _places(sequence, demand, torch.sort(keys, descending=True, stable=True).indices)
        kept = (by_key < capacity).nonzero()[:, 0]
        places = torch.full_like(sequence, -1)
        places[kept] = _places(sequence, demand.clamp(max=capacity), kept)[kept]
    positions = places.view(choices, tokens).t().contiguous() if choices_first else places.view(tokens, choices)
    return positions, demand.clone() if capacity is None else demand.clamp(max=capacity), demand


def _places(sequence: Tensor, demand: Tensor, order: Tensor) -> Tensor:
    """Of the assignments ``order``, in that order, among those to the same expert; ``demand`` counts them."""
    order = order[torch.sort(sequence[order], stable=True).indices]
    starts = (demand.cumsum(0) - demand)[sequence[order]]
    places = torch.empty_like(sequence)
    places[order] = torch.arange(len(order), device=sequence.device) - starts
    return places


def permute(x: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """y."""
    y = x.new_zeros(num_rows, x.shape[1])
    kept = rows >= 0
    y[rows[kept]] = x[kept.nonzero()[:, 0]]
    return y


def unpermute(y: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    """o."""
    total = wide(y).new_zeros(rows.shape[0], y.shape[1])
    for j in range(rows.shape[1]):
        kept = rows[:, j] >= 0
        term = wide(y[rows[kept, j]])
        if weights is not None:
            term = wide(weights[kept, j])[:, None] * term
        total[kept] = total[kept] + term
    return total.to(y.dtype)


def unpermute_backward(grad_out: Tensor, y: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(dy, dw)."""
    grad_y, grad_weights = torch.zeros_like(y), torch.zeros_like(weights)
    token, choice = (rows >= 0).nonzero(as_tuple=True)
    at, g = rows[token, choice], wide(grad_out[token])
    grad_y[at] = (wide(weights[token, choice])[:, None] * g).to(y.dtype)
    grad_weights[token, choice] = lane_sum(g * wide(y[at])).to(weights.dtype)
    return grad_y, grad_weights


def _exponentials(v: Tensor) -> Tensor:
    maximum = v.amax(-1, keepdim=True)
    return exp(v - torch.where(maximum == -torch.inf, 0.0, maximum))


def _inverse_sum(e: Tensor, indices: Tensor, renormalise: bool) -> Tensor:
    total = _sum_in_order(e.gather(-1, indices)) if renormalise else lane_sum(e).unsqueeze(-1)
    return torch.where(total == 0.0, 0.0, 1.0 / total)


def _sum_in_order(terms: Tensor) -> Tensor:
    total = terms.new_zeros(terms.shape[0], 1)
    for j in range(terms.shape[1]):
        total = total + terms[:, j : j + 1]
    return total
