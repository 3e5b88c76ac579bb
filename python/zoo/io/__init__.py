"""Tensors' bytes on disk: the Python face of the Rust crate ``zoo-io``.

`Handle` reads and writes tensors asynchronously, past the page cache, at the speed of the device; `BufferPool` makes
tensors in aligned, where possible page-locked, memory, under one cap with those of other processes if they share a
`Ledger`; `Striped` spreads one sequence of bytes over several devices;
`Mock` is a device that misbehaves on order.
"""

from __future__ import annotations

import torch

from zoo.io import _native
from zoo.io.align import AlignedSplit, split_aligned
from zoo.io.config import AioConfig
from zoo.io.errors import (
    CancelledError,
    ChecksumError,
    PoolExhaustedError,
    TransferError,
    UnavailableError,
    UnexpectedEndError,
)
from zoo.io.files import File, Striped
from zoo.io.future import Future, Transfer
from zoo.io.gds import Registration
from zoo.io.handle import Handle, HandleStats
from zoo.io.ledger import Ledger, LedgerStats
from zoo.io.memory import memory_of
from zoo.io.mock import Fault, Mock
from zoo.io.pool import BufferPool, PoolStats

__all__ = [
    "AioConfig",
    "AlignedSplit",
    "BufferPool",
    "CancelledError",
    "ChecksumError",
    "Fault",
    "File",
    "Future",
    "Handle",
    "HandleStats",
    "Ledger",
    "LedgerStats",
    "Mock",
    "PoolExhaustedError",
    "PoolStats",
    "Registration",
    "Striped",
    "Transfer",
    "TransferError",
    "UnavailableError",
    "UnexpectedEndError",
    "crc32c",
    "native_version",
    "split_aligned",
]


def crc32c(tensor: torch.Tensor) -> int:
    """CRC-32C (Castagnoli; RFC 3720, appendix B.4) of a contiguous CPU tensor's bytes, as `Handle` computes it."""
    return _native.crc32c(*memory_of(tensor, verb="sum"))


def native_version() -> str:
    """Version of the compiled crate behind this package."""
    return _native.__version__
