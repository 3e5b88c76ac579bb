"""Sums over tensors' bytes, and the version of the crate that computes them."""

from __future__ import annotations

import torch

from zoo.io import _native
from zoo.io.memory import memory_of


def crc32c(tensor: torch.Tensor) -> int:
    """CRC-32C (Castagnoli; RFC 3720, appendix B.4) of a contiguous CPU tensor's bytes, as `Handle` computes it."""
    return _native.crc32c(*memory_of(tensor, verb="sum"))


def native_version() -> str:
    """Version of the compiled crate behind this package."""
    return _native.__version__
