"""The layers of :mod:`zoo.nn` that a ZeRO optimizer is often used with, as ``zoo.zero`` names them too."""

from zoo.nn import (
    MemoryEfficientLinear,
    SequenceParallelAttention,
    TiledLinear,
    UnitList,
    dot_product_attention,
    memory_efficient_linear,
)

__all__ = [
    "MemoryEfficientLinear",
    "SequenceParallelAttention",
    "TiledLinear",
    "UnitList",
    "dot_product_attention",
    "memory_efficient_linear",
]
