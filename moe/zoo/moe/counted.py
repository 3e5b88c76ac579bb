"""What every layer with experts has for whoever trains it: counts, a bias that may move, and what it draws by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.moe.statistics import count

Tensor = torch.Tensor


class CountedLayer(nn.Module):
    """A layer of which the engine part "moe" reads how its experts were used.

    Attributes:
        num_experts: E, on all ranks.
        tally: (2, E) int64: sums of the tokens of each expert, before drops and after, of training forwards since
            somebody has set it to 0; recomputation does not count. None before the first.
    """

    num_experts: int
    tally: Tensor | None = None

    @property
    @abstractmethod
    def expert_ranks(self) -> Communicator | None:
        """Those that have the other experts; None where there are none, and before the mesh is known."""

    @abstractmethod
    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Of the experts that this rank has."""

    def draw_by(self, number: int) -> None:
        """Random numbers of the next forward are a function of this one, where the layer draws any."""

    @property
    def has_bias(self) -> bool:
        """Whether :meth:`commit` moves something."""
        return False

    def commit(self, demand: Tensor) -> None:
        """Move the bias that balances by the (E,) tokens of a whole step, over all ranks."""

    def count(self, demand: Tensor, counts: Tensor) -> None:
        """Add (E,) tokens of a forward, in training."""
        if not self.training or (not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()):
            return
        if self.tally is None or self.tally.device != demand.device:
            self.tally = torch.zeros(2, demand.numel(), dtype=torch.int64, device=demand.device)
        count(self.tally, demand, counts)
