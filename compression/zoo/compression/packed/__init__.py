"""Linear layers of 8 and 4 bits: modules, and their files."""

from zoo.compression.packed.files import load_packed, save_packed
from zoo.compression.packed.linear import PackedLinear, pack_model, packed_of, put

__all__ = ["PackedLinear", "load_packed", "pack_model", "packed_of", "put", "save_packed"]
