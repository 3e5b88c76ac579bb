"""Experts as one tensor for each of their matrices."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from zoo.moe.experts import grouped_mlp
from zoo.moe.experts.base import Experts
from zoo.moe.experts.grouped_linear import grouped_linear

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
        self.gated = gated
        wide = 2 * intermediate_size if gated else intermediate_size
        n = self.num_local
        self.up = nn.Parameter(torch.empty(n, hidden_size, wide))
        self.down = nn.Parameter(torch.empty(n, intermediate_size, hidden_size))
        self.up_bias = nn.Parameter(torch.zeros(n, wide)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(n, hidden_size)) if bias else None
        for weight in (self.up, self.down):
            bound = 1 / math.sqrt(weight.shape[1])  # as nn.Linear
            nn.init.uniform_(weight, -bound, bound)
        self._declare(list(self.parameters()), whole=True)

    def forward(self, x: Tensor, counts: Tensor, which: slice | None = None) -> Tensor:
        """See :class:`Experts`."""

        def of_chunk(weight: Tensor) -> Tensor:
            # A slice of all would copy its gradient once more.
            return (weight if which is None else weight[which]).to(x.dtype)

        up, down = of_chunk(self.up), of_chunk(self.down)
        up_bias, down_bias = (None if b is None else of_chunk(b) for b in (self.up_bias, self.down_bias))
        if isinstance(self.activation, str) and grouped_mlp.runs(x, self.activation):
            return grouped_mlp.grouped_mlp(
                x, up, down, counts, up_bias, down_bias, activation=self.activation, gated=self.gated
            )
        activation = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        h = grouped_linear(x, up, counts, up_bias)
        if self.gated:
            g, u = h.chunk(2, -1)
            h = activation(g) * u
        else:
            h = activation(h)
        return grouped_linear(h, down, counts, down_bias)
