"""Group-limited choice: the experts of a token are in a few groups, so that it goes to few nodes."""

from __future__ import annotations

import torch

from zoo.moe.gates.base import NoisePolicy
from zoo.moe.gates.loss_free import LossFreeGate

Tensor = torch.Tensor


class GroupLimitedGate(LossFreeGate):
    """As :class:`LossFreeGate`, of the ``top_groups`` groups of consecutive experts with the greatest value, which is
    the sum of their ``of_group`` greatest scores, the bias counted (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2,
    "node-limited routing"; with ``of_group=1`` and ``score="softmax"``, "DeepSeek-V2", section 2.2.2).

    Args:
        num_groups: G, divides E.
        top_groups: how many of them a token may use.
        of_group: how many of a group's best scores make its value.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, *, k: int = 2, noise: NoisePolicy | None = None, num_groups: int = 1,
        top_groups: int = 1, of_group: int = 2, speed: float = 1e-3, renormalise: bool = True, scale: float = 1.0,
        score: str = "sigmoid",
    ) -> None:  # fmt: skip
        super().__init__(
            hidden_size, num_experts, k=k, noise=noise, speed=speed, renormalise=renormalise, scale=scale, score=score
        )
        size = num_experts // max(num_groups, 1)
        if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
            raise ValueError(
                f"GroupLimitedGate got num_groups={num_groups} and top_groups={top_groups} for {num_experts} experts; "
                "groups are of equal size, and the best 1 to all of them count."
            )
        if not 1 <= of_group <= size or k > top_groups * size:
            raise ValueError(
                f"GroupLimitedGate got of_group={of_group} and k={k} with {top_groups} groups of {size} experts; "
                f"of_group is from 1 to {size}, k at most {top_groups * size}."
            )
        self.num_groups, self.top_groups, self.of_group = num_groups, top_groups, of_group

    def choose(self, values: Tensor) -> Tensor:
        """See :class:`LossFreeGate`."""
        groups = values.view(len(values), self.num_groups, self.num_experts // self.num_groups)
        best = groups.topk(self.of_group, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1, sorted=False).indices
        allowed = torch.zeros_like(groups[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
        return super().choose(groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).reshape(values.shape))
