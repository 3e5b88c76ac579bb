"""Steps that gates share: the k best of each token, tokens that do not count, and how often experts were chosen."""

from __future__ import annotations

import torch

from zoo.kernels.gating import top_k_gate
from zoo.moe.losses import Load, load_of, z_loss
from zoo.moe.routing import Priority, Routing

Tensor = torch.Tensor


def best(values: Tensor, k: int) -> Tensor:
    """(T, k) int64: the experts of the k greatest values of each token, the greatest first; of equal ones the lower
    index. Without a gradient."""
    return torch.sort(values.detach(), dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def by_softmax(
    logits: Tensor, used: Tensor | None, k: int, *, experts: Tensor | None = None, counted: int, renormalise: bool,
    priority: Priority = "choice",
) -> Routing:  # fmt: skip
    """Weights are probabilities of the softmax over all experts.

    Args:
        experts: (T, k), which; None for the k most probable.
        counted: how many choices of a token count for the balance loss.
    """
    probabilities = torch.softmax(logits, -1)
    if experts is None and logits.dtype is torch.float32:
        weights, experts = top_k_gate(logits.contiguous(), k)
    else:
        experts = best(logits, k) if experts is None else experts
        weights = probabilities.gather(1, experts)
    return routed(
        experts, weights, logits, used, load_of(probabilities, experts[:, :counted], used, choices=counted),
        renormalise=renormalise, priority=priority,
    )  # fmt: skip


def routed(
    experts: Tensor, weights: Tensor, logits: Tensor, used: Tensor | None, load: Load | None, *,
    renormalise: bool, priority: Priority = "choice", scale: float = 1.0, num_rows: int | None = None,
) -> Routing:  # fmt: skip
    """A :class:`Routing` in which tokens that do not count go nowhere."""
    num_experts = logits.shape[1]
    if used is not None:
        experts = torch.where(used.unsqueeze(1), experts, num_experts)
    ones = torch.ones_like(experts).reshape(-1)
    demand = ones.new_zeros(num_experts + 1).scatter_add_(0, experts.reshape(-1), ones)[:num_experts]
    return Routing(
        experts=experts, weights=weights, demand=demand, load=load, z_loss=z_loss(logits, used),
        priority=priority, renormalise=renormalise, scale=scale,
        num_rows=num_rows,
    )  # fmt: skip
