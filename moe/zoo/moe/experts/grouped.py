"""Experts as one tensor for each of their matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.moe.experts import grouped_mlp
from zoo.moe.experts.base import Experts
from zoo.moe.experts.grouped_linear import grouped_linear
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Of tensors over all experts this rank takes its own part."""
        taken = dict(state_dict)
        for name, parameter in self.named_parameters(recurse=False):
            given = state_dict.get(prefix + name)
            if given is not None and given.shape == (self.num_experts, *parameter.shape[1:]):
                taken[prefix + name] = given[self.first : self.first + self.num_local]
        super()._load_from_state_dict(taken, prefix, *args, **kwargs)

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
