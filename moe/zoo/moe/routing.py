"""What a gate decides: which experts each token goes to, and how their outputs are weighed.

Legend: T tokens of this rank's micro-batch, E experts, K assignments of a token (k, or E where experts choose).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from zoo.kernels.gating import expert_rows, positions_in_expert
from zoo.moe.losses import Load

Tensor = torch.Tensor
Priority = Literal["choice", "token"] | Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Of one micro-batch on one rank."""

    experts: Tensor
    """(T, K) int64: in [0, E), or E where there is none."""
    weights: Tensor
    """(T, K), float32 or wider: by which the outputs are multiplied; differentiable."""
    demand: Tensor
    """(E,) int64: assignments to each expert, before anything is dropped."""
    load: Load | None
    """What the balance loss is made of; None for gates that need none."""
    z_loss: Tensor
    """(): mean_t (log Σ_e exp v_te)^2 of the logits v."""
    priority: Priority = "choice"
    """Which assignments a full expert keeps: all first choices before second ones, all choices of earlier tokens, or
    those with the greatest values of a (T, K) tensor of floating point numbers."""
    renormalise: bool = False
    """Weights are divided by the sum over what was not dropped."""
    scale: float = 1.0
    """They are multiplied by this at the end."""
    num_rows: int | None = None
    """As many assignments as there can be at most; T·K if not given."""

    @property
    def balance(self) -> Tensor:
        """(): the load balancing loss of the micro-batch, about 1 where experts are used evenly; 0 without a load."""
        return self.weights.new_zeros(()) if self.load is None else self.load.loss()

    def with_priority(self, priority: Priority) -> Routing:
        """The same with another priority."""
        return replace(self, priority=priority)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where each assignment is among rows that are sorted by expert."""

    experts: Tensor
    """(T, K) int64: E for what is dropped."""
    rows: Tensor
    """(T, K) int64; -1 for what is dropped."""
    weights: Tensor
    """(T, K): final; 0 for what is dropped."""
    counts: Tensor
    """(E,) int64: rows of each expert, one expert after the other; they fill the first Σ counts rows."""
    num_rows: int
    """R: room for all of them."""

    def part(self, begin: int, end: int, weights: Tensor) -> Places:
        """Of the tokens [begin, end) alone, with their ``weights``; nothing else is dropped."""
        return packed(self.experts[begin:end].contiguous(), weights, self.counts.numel(), None)

    def reordered(self, order: Tensor) -> Places:
        """Rows in another order of experts: e becomes ``order[e]``."""
        num_experts = self.counts.numel()
        moved = torch.cat([order, order.new_tensor([num_experts])])[self.experts]
        return packed(moved, self.weights, num_experts, self.num_rows)


def packed(experts: Tensor, weights: Tensor, num_experts: int, num_rows: int | None = None) -> Places:
    """Of (T, K) assignments and their weights; nothing is dropped but what goes to no expert."""
    at = positions_in_expert(experts, num_experts + 1, priority="token")
    rows = torch.where(experts < num_experts, expert_rows(experts, at), -1)
    return Places(
        experts=experts, rows=rows, weights=weights, counts=at.counts[:num_experts],
        num_rows=rows.numel() if num_rows is None else num_rows,
    )  # fmt: skip


def capacity(num_tokens: int, num_experts: int, factor: float, minimum: int) -> int:
    """max(⌈T/E · factor⌉, minimum), in float32, and at most T.

    Lepikhin et al. 2021 (GShard), section 2.2; Fedus et al. 2022 (Switch), equation 3. float32 as in DeepSpeed: 25
    tokens, 2 experts and a factor of 1.2 make 16.
    """
    if num_tokens == 0:
        return 0
    exact = _single(_single(num_tokens / num_experts) * _single(factor))
    return min(max(math.ceil(exact), minimum), num_tokens)


def _single(value: float) -> float:
    """Rounded to float32, in arithmetic that compilers can follow (Dekker 1971, section 5)."""
    high = value * (2.0**29 + 1.0)
    return high - (high - value)


def place(routing: Routing, limit: int | None) -> Places:
    """Give each assignment a row, the rows of an expert one after the other; from ``limit`` on it is dropped.

    Weights are renormalised over what is left: w_j / max(Σ_j w_j, ε), ε that of their dtype.
    """
    num_experts = routing.demand.numel()
    # Expert E takes the assignments that are none.
    priority = routing.priority.contiguous() if isinstance(routing.priority, torch.Tensor) else routing.priority
    at = positions_in_expert(routing.experts, num_experts + 1, capacity=limit, priority=priority)
    counts = at.counts[:num_experts]
    rows = torch.where(routing.experts < num_experts, expert_rows(routing.experts, at), -1)
    weights = torch.where(rows >= 0, routing.weights, 0.0)
    if routing.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    if routing.scale != 1.0:
        weights = weights * routing.scale
    num_rows = rows.numel() if routing.num_rows is None else routing.num_rows
    experts = routing.experts if limit is None else torch.where(rows >= 0, routing.experts, num_experts)
    return Places(experts=experts, rows=rows, weights=weights, counts=counts, num_rows=num_rows)
