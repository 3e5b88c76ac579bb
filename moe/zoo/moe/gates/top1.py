"""Top-1: each token goes to its most probable expert."""

from __future__ import annotations

import torch

from zoo.moe.gates.base import Gate, NoisePolicy
from zoo.moe.gates.chosen import best, by_softmax
from zoo.moe.noise import gumbel, uniform
from zoo.moe.routing import Routing

Tensor = torch.Tensor


class Top1Gate(Gate):
    """e_t = argmax_e v_te, with the weight p_te as it is (Fedus et al. 2022, "Switch Transformers", section 2.1).

    With "RSample" e_t is the argmax of v plus Gumbel noise: drawn from p. The balance loss is Switch's.

    Args:
        random_tokens: in training, a full expert keeps tokens that are drawn, instead of the first ones ("random token
            selection", Kim et al. 2021, "Scalable and efficient MoE training for multitask multilingual models",
            section 3.2).
    """

    max_k = 1

    def __init__(
        self, hidden_size: int, num_experts: int, *, k: int = 1, noise: NoisePolicy | None = None,
        random_tokens: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, num_experts, k=k, noise=noise)
        if k != 1:
            raise ValueError(f"Top1Gate got k={k}; it has 1. Use Top2Gate or TopKGate.")
        self.random_tokens = random_tokens

    @property
    def draws(self) -> bool:
        """Whether training needs random numbers."""
        return self.noise is not None or self.random_tokens

    def route(self, logits: Tensor, used: Tensor | None, key: Tensor | None) -> Routing:
        """See :class:`Gate`."""
        experts = None
        if key is not None and self.noise == "RSample":
            experts = best(logits + gumbel(key, tuple(logits.shape), salt=1), 1)
        lots = uniform(key, (len(logits), 1), salt=2) if key is not None and self.random_tokens else None
        return by_softmax(
            logits, used, 1, experts=experts, counted=1, renormalise=False, priority="choice" if lots is None else lots
        )
