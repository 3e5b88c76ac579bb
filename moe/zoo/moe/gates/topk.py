"""Top-k for any k."""

from __future__ import annotations

import torch

from zoo.moe.gates.base import Gate, NoisePolicy
from zoo.moe.gates.chosen import best, by_softmax
from zoo.moe.noise import gumbel
from zoo.moe.routing import Routing

Tensor = torch.Tensor


class TopKGate(Gate):
    """The k most probable experts, weighed by their probabilities.

    A full expert keeps its most probable tokens. The balance loss counts all k choices (divided by k).

    Args:
        renormalise: divide the weights by their sum over what was not dropped (Mixtral; DeepSpeed), else they stay
            probabilities of the softmax over all experts (Qwen-MoE with ``norm_topk_prob`` false).
    """

    def __init__(
        self, hidden_size: int, num_experts: int, *, k: int = 2, noise: NoisePolicy | None = None,
        renormalise: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, num_experts, k=k, noise=noise)
        self.renormalise = renormalise

    def route(self, logits: Tensor, used: Tensor | None, key: Tensor | None) -> Routing:
        """See :class:`Gate`."""
        experts = None
        if key is not None and self.noise == "RSample":
            experts = best(logits + gumbel(key, tuple(logits.shape), salt=1), self.k)
        found = by_softmax(logits, used, self.k, experts=experts, counted=self.k, renormalise=self.renormalise)
        return found.with_priority(found.weights.detach())
