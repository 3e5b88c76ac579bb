"""Linear layers of 8 and 4 bits: modules, and their files."""

from zoo.compression.packed.files import load_packed, save_packed
from zoo.compression.packed.linear import pack_model, packed_of, put
from zoo.nn import PackedLinear

__all__ = ["PackedLinear", "load_packed", "pack_model", "packed_of", "put", "save_packed"]
