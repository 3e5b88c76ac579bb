"""Rows of linear layers and convolutions that go away."""

from __future__ import annotations

from torch import nn

from zoo.compression.config import RowPruningSection
from zoo.compression.pruning.modules import is_convolution, is_linear
from zoo.compression.pruning.technique import UnitPruning


class RowPruning(UnitPruning[RowPruningSection]):
    """The section ``row_pruning``: outputs of linear layers or convolutions, with their biases.

    ``related_modules`` are the layers whose input columns go with them (also those after a flatten, and gated partners,
    "up_proj" beside "gate_proj", whose outputs go too).
    """

    name = "row_pruning"

    def prunes(self, module: nn.Module) -> bool:
        """Whether it is a linear layer or a convolution."""
        return is_linear(module) or is_convolution(module)
