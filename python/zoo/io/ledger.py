"""One account of host memory for the pools of several processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from zoo.io import _native
from zoo.io.checks import whole_number


class LedgerStats(NamedTuple):
    """Counts of a `Ledger`, over all pools that share it."""

    capacity_bytes: int
    """Hard cap of ``reserved_bytes``."""
    reserved_bytes: int
    """Taken from the system by all of them."""
    peak_bytes: int
    """Largest ``reserved_bytes`` so far."""


class Ledger:
    """A count of reserved bytes in shared memory: pools that are given it stay under its capacity together.

    The memory of each pool stays private to its process; only the number is shared. What one pool does not need another
    may take. While less than an eighth of the capacity is left, pools keep nothing that they do not use.

    Args:
        path: a file of one page, which the first process makes (mode 0600) and the others join. It should lie in memory
            (``/dev/shm``) or on a local file system, in a folder that only its owner may write. When all have opened it
            the name may be removed: the account lives as long as a process has it.
        capacity_bytes: hard cap of what all pools together take from the system, at least 4096; the same for all.

    A process that ends while it holds buffers gives nothing back, so a ledger is for one job: the next one makes its
    own. A child made by ``fork`` shares the account, and does not give back what its parent holds.

    Raises:
        ValueError: the file is no ledger of this version and capacity, or the capacity is too small.
        UnavailableError: the file cannot be made, opened or mapped.
    """

    def __init__(self, path: str | os.PathLike[str], capacity_bytes: int) -> None:
        whole_number("capacity_bytes", capacity_bytes, 4096, 1 << 62)
        self.native = _native.Ledger(Path(path), capacity_bytes)

    def stats(self) -> LedgerStats:
        """Counts of now."""
        return LedgerStats(**self.native.stats())

    def __repr__(self) -> str:
        stats = self.stats()
        return f"Ledger({stats.reserved_bytes} of {stats.capacity_bytes} bytes reserved)"
