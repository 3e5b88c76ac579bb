"""Compressed models in the formats of others."""

from zoo.compression.export.gguf import write_gguf

__all__ = ["write_gguf"]
