"""Group-wise quantisation to 8 and 4 bits, for ZeRO++: y = s·round(x/s). The maths is in ``quantise.h``."""

from zoo.kernels.quantise.ops import dequantise_, quantise

__all__ = ["dequantise_", "quantise"]
