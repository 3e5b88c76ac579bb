"""A mixture in the place of a transformer's perceptron: the component ``mlp: moe``."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from zoo.config import ComponentChoice, Section
from zoo.moe.dispatch import place_of_rank
from zoo.moe.experts.grouped import GroupedExperts
from zoo.moe.mixture import Capacity, MixtureOfExperts
from zoo.registry import DEFAULT

Tensor = torch.Tensor


class GateChoice(ComponentChoice):
    """Which gate, such as "topk", and its options."""

    kind: ClassVar[str] = "moe_gate"
    runtime: ClassVar[tuple[str, ...]] = ("hidden_size", "num_experts")


class MoEMlp(nn.Module):
    """(…, D) → (…, D) through experts, and the losses that keep them balanced, ready to be added to a model's own.

    Args:
        config: options.
        width: D.
        depth: layers of the model, which the scale of the initial weights depends on.
        generator: of the initial weights: N(0, 0.02²), those back into the residual stream N(0, 0.02² / (2 depth)).
    """

    class Config(Section):
        """Options of :class:`MoEMlp`."""

        num_experts: int = Field(default=16, ge=1)
        """E."""
        gate: GateChoice = Field(default_factory=lambda: GateChoice(type="topk", params={"k": 2}))
        """Which experts a token goes to."""
        intermediate_size: int | None = Field(default=None, ge=1)
        """H of each expert; default: 7/16 of the width."""
        shared_size: int | None = Field(default=None, ge=0)
        """H of an expert that all tokens go to, 0 for none; default: 7/8 of the width. With two of the others that is
        7/16 of a dense transformer's perceptron."""
        capacity_factor: float | None = Field(default=None, gt=0)
        """Tokens that an expert takes, over its even share; null: all."""
        balance: float = Field(default=0.01, ge=0)
        """Factor of the load balancing loss."""
        z: float = Field(default=0.0, ge=0)
        """Factor of the z-loss."""
        ep_size: int = Field(default=1, ge=1)
        """Ranks that share the experts."""

    def __init__(self, config: Config, *, width: int, depth: int, generator: torch.Generator) -> None:
        super().__init__()
        hidden = config.intermediate_size or max(1, 7 * width // 16)
        shared_size = max(1, 7 * width // 8) if config.shared_size is None else config.shared_size
        gate = DEFAULT.build(
            "moe_gate", config.gate.type, config.gate.params, hidden_size=width, num_experts=config.num_experts
        )
        experts = GroupedExperts(
            config.num_experts, width, hidden, activation="gelu_tanh", bias=True, ep_size=config.ep_size,
            ep_rank=place_of_rank(config.ep_size),
        )  # fmt: skip
        shared = None
        if shared_size:
            shared = nn.Sequential(nn.Linear(width, shared_size), nn.GELU("tanh"), nn.Linear(shared_size, width))
        factor = config.capacity_factor
        limit = None if factor is None else Capacity(factor=factor, eval_factor=max(factor, 2.0))
        self.mixture = MixtureOfExperts(gate, experts, capacity=limit, shared=shared)
        self._balance, self._z = config.balance, config.z
        self._initialise(generator, 0.02, 0.02 / (2 * depth) ** 0.5)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator, into: float, back: float) -> None:
        experts = self.mixture.experts
        for name, parameter in self.mixture.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
                continue
            scale = back if name.endswith(("down", "shared.2.weight")) else into
            if name.startswith("experts.") and experts.num_local < experts.num_experts:
                # The same draws on every rank, of which it keeps its own.
                drawn = torch.empty(experts.num_experts, *parameter.shape[1:]).normal_(0, scale, generator=generator)
                parameter.copy_(drawn[experts.first : experts.first + experts.num_local])
            else:
                parameter.normal_(0.0, scale, generator=generator)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and (): balance and z-loss times their factors."""
        found = self.mixture(x)
        return found.output, self._balance * found.balance + self._z * found.z_loss
