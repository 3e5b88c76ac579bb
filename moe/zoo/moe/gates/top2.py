"""Top-2, as GShard has it."""

from __future__ import annotations

import torch

from zoo.moe.gates.base import Gate, NoisePolicy
from zoo.moe.gates.chosen import best, by_softmax
from zoo.moe.noise import gumbel
from zoo.moe.routing import Routing

Tensor = torch.Tensor


class Top2Gate(Gate):
    """The most probable expert and a second one, weighed by p_1 and p_2 divided by their sum after drops (Lepikhin et
    al. 2021, "GShard", algorithm 1).

    A full expert serves all first choices before any second one. The balance loss counts first choices.

    Args:
        sample_second: in training the second expert is the argmax of the logits plus Gumbel noise, that is drawn from
            the softmax over all experts but the first. Evaluation never draws.
    """

    max_k = 2

    def __init__(
        self, hidden_size: int, num_experts: int, *, k: int = 2, noise: NoisePolicy | None = None,
        sample_second: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, num_experts, k=k, noise=noise)
        if k != 2:
            raise ValueError(f"Top2Gate got k={k}; it has 2. Use Top1Gate or TopKGate.")
        self.sample_second = sample_second

    @property
    def draws(self) -> bool:
        """Whether training needs random numbers."""
        return self.noise is not None or self.sample_second

    def route(self, logits: Tensor, used: Tensor | None, key: Tensor | None) -> Routing:
        """See :class:`Gate`."""
        experts = None
        if key is not None and (self.sample_second or self.noise == "RSample"):
            noisy = logits + gumbel(key, tuple(logits.shape), salt=1)
            first = best(noisy if self.noise == "RSample" else logits, 1)
            others = (noisy if self.sample_second else logits).detach().scatter(1, first, -torch.inf)
            experts = torch.cat([first, best(others, 1)], 1)
        return by_softmax(logits, used, 2, experts=experts, counted=1, renormalise=True)
