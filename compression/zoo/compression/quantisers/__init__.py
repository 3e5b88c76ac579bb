"""Quantisers: a tensor in, the nearest tensor that few bits can say out. See ``uniform.py`` and ``extreme.py``."""

from zoo.compression.quantisers.extreme import binary, ternary
from zoo.compression.quantisers.fused import fits, nearest
from zoo.compression.quantisers.grouping import check_finite, grouped
from zoo.compression.quantisers.noise import noise
from zoo.compression.quantisers.straight import mixed, straight_through
from zoo.compression.quantisers.uniform import asymmetric, symmetric, within

__all__ = [
    "asymmetric",
    "binary",
    "check_finite",
    "fits",
    "grouped",
    "mixed",
    "nearest",
    "noise",
    "straight_through",
    "symmetric",
    "ternary",
    "within",
]
