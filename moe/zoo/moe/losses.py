"""Losses of gates: graph outputs, which the model adds to its own loss.

Legend: T tokens, E experts; p (T, E) probabilities; v (T, E) logits; u (T,) 1 for tokens that count.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def mean_of_used(values: Tensor, used: Tensor | None) -> Tensor:
    """(E,): the mean of (T, E) over tokens that count; 0 if none does."""
    if used is not None:
        values = torch.where(used.unsqueeze(-1), values, 0.0)
        return values.sum(0) / used.sum().clamp(min=1)
    return values.sum(0) / max(values.shape[0], 1)


def balance(probabilities: Tensor, chosen: Tensor, used: Tensor | None = None, *, choices: int = 1) -> Tensor:
    """E/c Σ_e m_e f_e with m_e = mean_t p_te and f_e = mean_t [e is among the chosen of t], c = ``choices``.

    At least 1 where the two are alike, and 1 where they are even. Fedus et al. 2022 (Switch), equation 4; Lepikhin et
    al. 2021 (GShard), algorithm 1. Only m has a gradient. Local to a rank's micro-batch.

    Args:
        chosen: (T, c) int64: which choices count: the first one of each token, or all k.
    """
    num_experts = probabilities.shape[1]
    hits = torch.zeros_like(probabilities).scatter_add_(1, chosen, torch.ones_like(chosen, dtype=probabilities.dtype))
    found = mean_of_used(probabilities, used) * mean_of_used(hits, used)
    return found.sum() * (num_experts / choices)


def z_loss(logits: Tensor, used: Tensor | None = None) -> Tensor:
    """mean_t (log Σ_e exp v_te)^2: keeps logits small (Zoph et al. 2022, "ST-MoE", equation 5)."""
    return mean_of_used(logits.logsumexp(-1, keepdim=True).square(), used).squeeze(0)
