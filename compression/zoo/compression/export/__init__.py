"""Compressed models in the formats of others. Each imports its package when it is called."""

from zoo.compression.export.gguf import write_gguf
from zoo.compression.export.torchao import from_torchao, load_torchao, save_torchao, to_torchao

__all__ = ["from_torchao", "load_torchao", "save_torchao", "to_torchao", "write_gguf"]
