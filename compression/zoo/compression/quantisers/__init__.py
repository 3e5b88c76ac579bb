"""Quantisers: a tensor in, the nearest tensor that few bits can say out. See ``uniform.py`` and ``extreme.py``."""

from zoo.compression.quantisers.extreme import binary, ternary
from zoo.compression.quantisers.fused import fits, nearest
from zoo.compression.quantisers.grouping import Lies, check_finite, ends_of, grouped, how_groups_lie
from zoo.compression.quantisers.noise import noise
from zoo.compression.quantisers.straight import mixed, straight_through
from zoo.compression.quantisers.uniform import asymmetric, symmetric, within

__all__ = [
    "Lies",
    "asymmetric",
    "binary",
    "check_finite",
    "ends_of",
    "fits",
    "grouped",
    "how_groups_lie",
    "mixed",
    "nearest",
    "noise",
    "straight_through",
    "symmetric",
    "ternary",
    "within",
]
