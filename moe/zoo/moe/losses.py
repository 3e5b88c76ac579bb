"""Losses of gates: graph outputs, which the model adds to its own loss.

Legend: T tokens, E experts; p (T, E) probabilities; v (T, E) logits; u (T,) 1 for tokens that count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zoo.moe.exchange import ranks_of, sum_over

Tensor = torch.Tensor


def mean_of_used(values: Tensor, used: Tensor | None) -> Tensor:
    """(E,): the mean of (T, E) over tokens that count; 0 if none does."""
    if used is not None:
        values = torch.where(used.unsqueeze(-1), values, 0.0)
        return values.sum(0) / used.sum().clamp(min=1)
    return values.sum(0) / max(values.shape[0], 1)


@dataclass(frozen=True, kw_only=True)
class Load:
    """How experts are wanted and used, in one micro-batch or several."""

    probability: Tensor
    """(E,) m_e = mean_t p_te; has the gradient."""
    share: Tensor
    """(E,) f_e = mean_t [e is among the chosen of t]."""
    num_tokens: Tensor
    """(): how many count."""
    choices: int
    """c: how many of each token do."""

    def loss(self) -> Tensor:
        """E/c Σ_e m_e f_e."""
        return (self.probability * self.share).sum() * (self.share.numel() / self.choices)

    def over(self, comm: int) -> Load:
        """Of all micro-batches of the ranks of ``comm`` (:func:`zoo.moe.exchange.known_as`). Collective.

        f is that of all tokens, and m weighs as the rank's share of them: the mean of the ranks' losses is the loss of
        all tokens at once, and so is its gradient (Qiu et al. 2025, "Demons in the Detail", section 3.1).
        """
        size = ranks_of(comm)
        sums = sum_over(torch.cat([self.share * self.num_tokens, self.num_tokens.reshape(1).to(self.share)]), comm)
        total = sums[-1].clamp(min=1)
        return Load(
            probability=self.probability * (self.num_tokens * size / total), share=sums[:-1] / total,
            num_tokens=self.num_tokens, choices=self.choices,
        )  # fmt: skip


def load_of(probabilities: Tensor, chosen: Tensor, used: Tensor | None = None, *, choices: int = 1) -> Load:
    """Of (T, E) probabilities and (T, c) chosen experts."""
    hits = torch.zeros_like(probabilities).scatter_add_(1, chosen, torch.ones_like(chosen, dtype=probabilities.dtype))
    num_tokens = probabilities.new_tensor(float(len(probabilities))) if used is None else used.sum()
    return Load(
        probability=mean_of_used(probabilities, used), share=mean_of_used(hits, used),
        num_tokens=num_tokens.to(probabilities.dtype), choices=choices,
    )  # fmt: skip


def balance(probabilities: Tensor, chosen: Tensor, used: Tensor | None = None, *, choices: int = 1) -> Tensor:
    """E/c Σ_e m_e f_e with m_e = mean_t p_te and f_e = mean_t [e is among the chosen of t], c = ``choices``.

    At least 1 where the two are alike, and 1 where they are even. Fedus et al. 2022 (Switch), equation 4; Lepikhin et
    al. 2021 (GShard), algorithm 1. Only m has a gradient. Local to a rank's micro-batch.

    Args:
        chosen: (T, c) int64: which choices count: the first one of each token, or all k.
    """
    return load_of(probabilities, chosen, used, choices=choices).loss()


def z_loss(logits: Tensor, used: Tensor | None = None) -> Tensor:
    """mean_t (log Σ_e exp v_te)^2: keeps logits small (Zoph et al. 2022, "ST-MoE", equation 5)."""
    return mean_of_used(logits.logsumexp(-1, keepdim=True).square(), used).squeeze(0)
