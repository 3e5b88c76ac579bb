"""Experts choose their tokens."""

from __future__ import annotations

import torch

from zoo.moe.gates.base import Gate, NoisePolicy
from zoo.moe.gates.chosen import best, routed
from zoo.moe.noise import gumbel
from zoo.moe.routing import Routing

Tensor = torch.Tensor


class ExpertChoiceGate(Gate):
    """Each expert takes the C = ⌈T k / E⌉ tokens that are the most probable for it, weighed by p_te (Zhou et al. 2022,
    "Mixture-of-Experts with Expert Choice Routing", section 3.2).

    The load is even by construction, so there is no balance loss (it is 0) and nothing is dropped; a token may have no
    expert, or all of them. **It looks into the future of a causal model**: whether a token is taken depends on all
    tokens of the micro-batch, later ones too. Use it in encoders, or know what you do.

    Args:
        k: experts a token on average; the paper's capacity factor.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, *, k: int = 2, noise: NoisePolicy | None = None
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, num_experts, k=k, noise=noise)

    def route(self, logits: Tensor, used: Tensor | None, key: Tensor | None) -> Routing:
        """See :class:`Gate`. Tokens that do not count are taken last, and then by nobody."""
        tokens, num_experts = logits.shape
        p = torch.softmax(logits, -1)
        values = (
            logits + gumbel(key, (tokens, num_experts), salt=1) if key is not None and self.noise == "RSample" else p
        )
        if used is not None:
            values = values.masked_fill(~used.unsqueeze(1), -torch.inf)
        count = min(-(-tokens * self.k // num_experts), tokens)
        taken = torch.zeros_like(p, dtype=torch.bool).scatter_(0, best(values.t(), count).t(), True)
        experts = torch.where(taken, torch.arange(num_experts, device=logits.device), num_experts)
        return routed(experts, p, logits, used, None, renormalise=False, num_rows=count * num_experts)
