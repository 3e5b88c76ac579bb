"""Group-wise quantisation to 8 and 4 bits, symmetric as in ZeRO++ or with a minimum. The maths is in ``quantise.h``."""

from zoo.kernels.quantise.ops import dequantise_, dequantise_asymmetric_, quantise, quantise_asymmetric

__all__ = ["dequantise_", "dequantise_asymmetric_", "quantise", "quantise_asymmetric"]
