"""Channels of convolutions that go away."""

from __future__ import annotations

from torch import nn

from zoo.compression.config import ChannelPruningSection
from zoo.compression.pruning.modules import is_convolution
from zoo.compression.pruning.technique import UnitPruning


class ChannelPruning(UnitPruning[ChannelPruningSection]):
    """The section ``channel_pruning``: output channels of convolutions, with their biases.

    ``related_modules`` are the layers whose input channels go with them, and the batch norms between.
    """

    name = "channel_pruning"

    def prunes(self, module: nn.Module) -> bool:
        """Whether it is a convolution."""
        return is_convolution(module)
