"""A gate whose choices become sharper or softer by a temperature."""

from __future__ import annotations

import torch

from zoo.moe import TopKGate


class TemperatureGate(TopKGate):
    """p = softmax(v / T) over the logits v; the k most probable experts, weighed by p (zoo.moe.TopKGate).

    Args:
        hidden_size: D of the tokens. num_experts: E. k: experts of a token.
        temperature: T > 0. The order of experts, and so the choice, is the same for every T; the weights are not.

    Raises:
        ValueError: the temperature is not above 0.
    """

    def __init__(self, hidden_size: int, num_experts: int, *, k: int = 2, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"TemperatureGate got temperature={temperature}; it must be above 0, such as 1.0.")
        super().__init__(hidden_size, num_experts, k=k)
        self.temperature = temperature

    def route(self, logits: torch.Tensor, used: torch.Tensor | None, key: torch.Tensor | None):
        """By (T, E) logits."""
        return super().route(logits / self.temperature, used, key)
