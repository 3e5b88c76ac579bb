"""What all gates have in common.

Legend: T tokens, D hidden size, E experts, k choices; x (T, D), logits v (T, E), p = softmax(v).
"""

from __future__ import annotations

from abc import abstractmethod
from numbers import Integral
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from zoo.moe.noise import Keys, uniform
from zoo.moe.routing import Routing

Tensor = torch.Tensor

JITTER = 1e-2
"""Inputs are multiplied by numbers in [1 - JITTER, 1 + JITTER] (Fedus et al. 2022, "Switch", section 2.4)."""

NoisePolicy = Literal["Jitter", "RSample"]


def check_whole(who: str, **given: object) -> None:
    """Raise ValueError for what is no whole number."""
    wrong = [f"{name}={value!r}" for name, value in given.items() if not isinstance(value, Integral)]
    if wrong:
        raise ValueError(f"{who} got {', '.join(wrong)}; {', '.join(given)} are whole numbers (int).")


class Gate(nn.Module):
    """v = x W^T and a choice by v, computed in float32 (float64 for such inputs) in every dtype, and in autocast too.

    Args:
        hidden_size: D.
        num_experts: E.
        k: experts of a token.
        noise: in training: "Jitter" multiplies what the gate sees by uniform numbers in [0.99, 1.01]; "RSample" adds
            Gumbel noise to the logits that choose (weights are those without it).

    Attributes:
        weight: (E, D).
        noise_key: () int64: what random numbers are drawn by. An engine sets it from seed, layer, step, micro-batch and
            rank; without one, each training forward draws it from torch's generator, which activation checkpointing
            puts back for recomputation. A layer that is called twice by one key draws the same twice.

    Raises:
        ValueError: k or the noise cannot be.
    """

    max_k: int | None = None
    """Of a kind of gate."""

    def __init__(self, hidden_size: int, num_experts: int, *, k: int = 1, noise: NoisePolicy | None = None) -> None:
        super().__init__()
        check_whole(type(self).__name__, hidden_size=hidden_size, num_experts=num_experts, k=k)
        if hidden_size < 1:
            raise ValueError(f"{type(self).__name__} got hidden_size={hidden_size}; it is at least 1.")
        if num_experts < 1 or not 1 <= k <= num_experts:
            raise ValueError(f"{type(self).__name__} got k={k} of {num_experts} experts; k is from 1 to that number.")
        if noise not in (None, "Jitter", "RSample"):
            raise ValueError(f"{type(self).__name__} got noise={noise!r}; allowed are 'Jitter', 'RSample' and None.")
        self.hidden_size, self.num_experts, self.k, self.noise = hidden_size, num_experts, k, noise
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.noise_key: Tensor | None = None
        self._keys = Keys()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear``: U(-1/√D, 1/√D)."""
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor, used: Tensor | None = None) -> Routing:
        """Route (T, D) tokens.

        Args:
            used: (T,) bool, which tokens count; others go to no expert. None: all.
        """
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self._routed(x, used)
        return self._routed(x, used)

    def _routed(self, x: Tensor, used: Tensor | None) -> Routing:
        key = self._key(x.device) if self.training and self.draws else None
        given = x.to(torch.promote_types(x.dtype, torch.float32))
        if key is not None and self.noise == "Jitter":
            given = given * (1 - JITTER + 2 * JITTER * uniform(key, tuple(given.shape)).to(given.dtype))
        return self.route(F.linear(given, self.weight.to(given.dtype)), used, key)

    @property
    def draws(self) -> bool:
        """Whether training needs random numbers."""
        return self.noise is not None

    @abstractmethod
    def route(self, logits: Tensor, used: Tensor | None, key: Tensor | None) -> Routing:
        """By (T, E) logits; ``key`` where random numbers are wanted."""

    def capacity_choices(self) -> int:
        """How many choices of a token a capacity factor counts."""
        return self.k

    def _key(self, device: torch.device) -> Tensor:
        if self.noise_key is None:
            return torch.randint(2**62, (), dtype=torch.int64).to(device)
        if torch.compiler.is_compiling() or self.noise_key.device.type != "cpu":
            return self.noise_key.to(device)
        return torch.tensor(self._keys.of_forward(int(self.noise_key))).to(device)

    def extra_repr(self) -> str:
        """Sizes."""
        noise = f", noise={self.noise!r}" if self.noise else ""
        return f"{self.hidden_size} -> {self.num_experts}, k={self.k}{noise}"
