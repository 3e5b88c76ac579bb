"""Linear layers on weights of 8 and 4 bits: packing, y = x·Wᵀ + b, and its gradient. See ``packed_linear.h``."""

from zoo.kernels.packed_linear.ops import Activations, is_int8, packed_linear
from zoo.kernels.packed_linear.packing import PackedWeight, pack, pack_weight, unpack, unpack_weight

__all__ = [
    "Activations", "PackedWeight", "is_int8", "pack", "pack_weight", "packed_linear", "unpack", "unpack_weight",
]  # fmt: skip
