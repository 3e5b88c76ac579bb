"""Experts as one tensor for each of their matrices."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from zoo.moe.experts.base import Experts
from zoo.moe.experts.perceptron import Linear, gate, perceptron
from zoo.parts import mixed

Tensor = torch.Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
"""By name. More can be given as functions."""


class GroupedExperts(Experts):
    """Multi-layer perceptrons, y = φ(x U_e) V_e, or with a gate y = (φ(x G_e) ⊙ x U_e) V_e (Shazeer 2020, "GLU variants
    improve transformer").

    Args:
        num_experts: of the layer.
        hidden_size: D. intermediate_size: H.
        activation: φ, a name of ``ACTIVATIONS`` or a function.
        gated: with G.
        bias: whether U and V (and G) have biases.
        ep_size, ep_rank: see :class:`Experts`.

    Attributes:
        up: (E, D, H), or (E, D, 2H) with the columns of G first. down: (E, H, D).
        up_bias: (E, H or 2H). down_bias: (E, D).
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, *,
        activation: str | Callable[[Tensor], Tensor] = "gelu", gated: bool = False, bias: bool = False,
        ep_size: int = 1, ep_rank: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(num_experts, ep_size=ep_size, ep_rank=ep_rank)
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}; allowed are {', '.join(ACTIVATIONS)}, or a function.")
        self.activation = activation
        self.hidden_size, self.gated = hidden_size, gated
        wide = 2 * intermediate_size if gated else intermediate_size
        n = self.num_local
        self.up = nn.Parameter(torch.empty(n, hidden_size, wide))
        self.down = nn.Parameter(torch.empty(n, intermediate_size, hidden_size))
        self.up_bias = nn.Parameter(torch.empty(n, wide)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(n, hidden_size)) if bias else None
        self.reset_parameters()
        self._declare(whole=True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """U(-1/√n, 1/√n) of n inputs as ``nn.Linear``, biases 0. One number of torch's generator and the number of an
        expert say its values, so that they are the same at every ``ep_size``, and no two experts are alike."""
        for bias in (self.up_bias, self.down_bias):
            if bias is not None:
                bias.zero_()
        if self.up.device.type == "meta":
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        generator = torch.Generator(self.up.device)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            generator.manual_seed(mixed(self.first + e, seed))
            for weight in (up, down):
                bound = 1 / math.sqrt(max(weight.shape[0], 1))
                weight.uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor, counts: Tensor, which: slice | None = None) -> Tensor:
        """See :class:`Experts`."""
        named = self.activation if isinstance(self.activation, str) else None
        up, down = Linear(self.up, self.up_bias), Linear(self.down, self.down_bias)
        return perceptron(x, counts, which, up, down, self._between, named=named, gated=self.gated)

    def _between(self, h: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        return gate(h, activation) if self.gated else activation(h)
