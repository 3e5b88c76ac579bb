"""Layers that any model may use, with the ZeRO optimizers or without.

* :class:`TiledLinear`: a linear layer as a grid of tiles that are gathered one at a time.
* :func:`memory_efficient_linear`: linear layers that keep no cast copy of their weight under autocast.
* :class:`SequenceParallelAttention`: any attention over sequences that are split over ranks.
* :class:`UnitList`: a list of modules that are gathered one by one.
* :mod:`.blocks`: the repeated blocks of a model, and standing between them and who calls them.
* :func:`whole`: sharded parameters, whole for a while.
"""

from zoo.nn.linear import LinearSwap, MemoryEfficientLinear, memory_efficient_linear
from zoo.nn.sequence import SequenceParallelAttention, dot_product_attention
from zoo.nn.sharded import whole
from zoo.nn.tiling import TiledLinear
from zoo.nn.unit_list import UnitList

__all__ = [
    "LinearSwap",
    "MemoryEfficientLinear",
    "SequenceParallelAttention",
    "TiledLinear",
    "UnitList",
    "dot_product_attention",
    "memory_efficient_linear",
    "whole",
]
