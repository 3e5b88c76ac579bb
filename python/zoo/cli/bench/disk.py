"""A disk through ``zoo.io``, past the page cache: what it does not do so is not measured."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zoo.cli.bench.fitting import Line, fit
from zoo.cli.bench.timing import FEWEST, MOST

SIZES = tuple(1 << k for k in range(16, 29, 2))


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Lines of transfers between a file and aligned memory, bytes of a transfer against seconds until it is over."""

    read: Line
    write: Line
    backend: str
    file_system: str


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The kind of the file system that a folder is on, "unknown" where the system does not tell."""
    where, found, depth = folder.resolve(), "unknown", -1
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:  # of mounts at one place the last one is what is seen
        before, dash, after = line.partition(" - ")
        if not dash:
            continue
        place = Path(before.split()[4].replace("\\040", " "))
        if (place == where or place in where.parents) and len(place.parts) >= depth:
            found, depth = after.split()[0], len(place.parts)
    return found


def measure_disk(
    folder: Path, seconds: float, *, sizes: Sequence[int] = SIZES, clock: Callable[[], float] = time.perf_counter
) -> Disk:
    """Read and overwrite a file of the largest size, whole blocks that are allocated and written before.

    With ``O_DIRECT``: nothing stays in the page cache, which is made sure of by the handle's own count of bytes. The
    device's own cache, and the host's under a virtual machine, are not emptied.

    Raises:
        ValueError: the folder cannot be written, or its file system has no direct transfers.
    """
    import torch

    from zoo.io import Handle
    from zoo.io.errors import TransferError, UnavailableError

    kind, largest = file_system(folder), max(sizes)
    if kind in ("tmpfs", "ramfs"):
        raise ValueError(f"{folder} is in memory ({kind}); give --folder with a folder on a local disk, or --no-disk.")
    try:
        with tempfile.TemporaryDirectory(prefix="zoo-bench-", dir=folder) as inside, Handle(direct="always") as handle:
            data = handle.empty(largest, dtype=torch.uint8)
            data.random_(0, 256, generator=torch.Generator().manual_seed(0))
            with handle.open(Path(inside) / "data", "w") as file:
                handle.pwrite(data, file, fsync=True)
                write = _line(lambda size: handle.pwrite(data[:size], file), sizes, seconds / 2, clock)
            with handle.open(Path(inside) / "data", "r") as file:
                read = _line(lambda size: handle.pread(data[:size], file), sizes, seconds / 2, clock)
            through = handle.stats().buffered_bytes
            backend = handle.backend
    except (UnavailableError, TransferError, OSError) as error:
        raise ValueError(
            f"{folder} cannot be measured: {error}; give --folder with a folder on a local disk, or --no-disk."
        ) from error
    if through:
        raise ValueError(f"{through} bytes went through the page cache in {folder}: what was measured is not the disk.")
    return Disk(read=read, write=write, backend=backend, file_system=kind)


def _line(move: Callable[[int], object], sizes: Sequence[int], seconds: float, clock: Callable[[], float]) -> Line:
    times = []
    for size in sizes:
        move(size)
        found: list[float] = []
        end = clock() + seconds / len(sizes)
        while len(found) < FEWEST or (len(found) < MOST and clock() < end):
            begun = clock()
            move(size)
            found.append(clock() - begun)
        times.append(statistics.median(found))
    return fit(list(sizes), times)
