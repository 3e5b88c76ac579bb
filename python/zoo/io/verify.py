"""Does this machine move bytes as it should? Random transfers on every backend, compared with plain file I/O."""

from __future__ import annotations

import itertools
import random
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from zoo.io import _native
from zoo.io.checks import whole_number
from zoo.io.errors import UnavailableError
from zoo.io.files import DirectMode, File, Striped
from zoo.io.handle import Backend, Handle

BLOCK_SIZE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the machine and a folder offer."""

    io_uring: str
    """``yes``, or the kernel's reason."""
    direct: str
    """``yes`` with the alignments in bytes, or the reason."""
    locked_memory: str
    """How much memory a process may lock: registered buffers count against it, but for root's."""
    page_locked: str
    """``yes``, or why no GPU's memory can be locked."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one way of moving bytes did."""

    backend: Backend
    direct: DirectMode
    memory: str
    transfers: int
    num_bytes: int
    problem: str | None
    """None when every byte was right."""


def facts(folder: Path) -> Facts:
    """Ask the kernel."""
    try:
        Handle(backend="uring").close()
        ring = "yes"
    except UnavailableError as error:
        ring = str(error)
    with tempfile.TemporaryDirectory(prefix="zoo-io-verify-", dir=folder) as inside:
        file = _native.File(Path(inside) / "probe", True, "auto", False)
        if file.alignment is None:
            direct = f"no: {file.why_buffered}"
        else:
            direct = "yes: memory at multiples of {} bytes, offsets of {}".format(*file.alignment)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    problem = _native.cuda_problem()
    return Facts(
        io_uring=ring, direct=direct, locked_memory=locked, page_locked="yes" if problem is None else f"no: {problem}"
    )


def verify(folder: Path, *, num_bytes: int = 1 << 24, transfers: int = 60, seed: int = 0) -> Iterator[Outcome]:
    """Try every backend, past and through the page cache, with memory of the pool and ordinary one, striped and not.

    Each way writes ``transfers`` random ranges of a file of ``num_bytes`` bytes with checksums, compares the file with
    what plain writes would have left, and reads random ranges back.

    Raises:
        ValueError: nothing would be written or read.
    """
    whole_number("size", num_bytes, 1, 1 << 50)
    whole_number("transfers", transfers, 1, 1 << 30)
    backends: list[Backend] = ["uring", "threads"]
    modes: list[DirectMode] = ["auto", "never"]
    for backend, direct, memory in itertools.product(backends, modes, ("pool", "tensor", "striped")):
        problem = None
        with tempfile.TemporaryDirectory(prefix="zoo-io-verify-", dir=folder) as inside:
            try:
                with Handle(backend=backend, direct=direct, block_size=BLOCK_SIZE, num_threads=2) as handle:
                    problem = _try(handle, Path(inside), memory, num_bytes, transfers, random.Random(seed))
            except (OSError, UnavailableError) as error:
                problem = str(error)
        yield Outcome(
            backend=backend, direct=direct, memory=memory, transfers=2 * transfers, num_bytes=num_bytes, problem=problem
        )


def _try(
    handle: Handle, folder: Path, memory: str, num_bytes: int, transfers: int, chance: random.Random
) -> str | None:
    names = [folder / f"part{k}" for k in range(3 if memory == "striped" else 1)]
    target = Striped(names, stripe_bytes=BLOCK_SIZE) if memory == "striped" else names[0]
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    expected = torch.zeros(num_bytes, dtype=torch.uint8)
    handle.write(expected, target)
    for _ in range(transfers):
        start, stop = sorted((chance.randrange(num_bytes + 1), chance.randrange(num_bytes + 1)))
        part = torch.randint(0, 256, (stop - start,), dtype=torch.uint8, generator=generator)
        source = handle.empty(stop - start, dtype=torch.uint8).copy_(part) if memory == "pool" else part
        done = handle.pwrite(source, target, start, checksum=True)
        expected[start:stop] = part
        if done.checksum != _native.crc32c(part.data_ptr(), part.nbytes):
            return f"the checksum of {part.nbytes} bytes written at {start} is wrong"
    found = _by_plain_reads(target, names, num_bytes)
    if not torch.equal(found, expected):
        return f"byte {int((found != expected).nonzero()[0])} of the file is wrong after {transfers} writes"
    for _ in range(transfers):
        start, stop = sorted((chance.randrange(num_bytes + 1), chance.randrange(num_bytes + 1)))
        back = (
            handle.empty(stop - start, dtype=torch.uint8)
            if memory == "pool"
            else torch.empty(stop - start, dtype=torch.uint8)
        )
        handle.pread(back, target, start, checksum=True)
        if not torch.equal(back, expected[start:stop]):
            return f"{stop - start} bytes read at {start} are wrong"
    return None


def _by_plain_reads(target: Path | Striped | File, names: list[Path], num_bytes: int) -> torch.Tensor:
    # One byte more, because torch makes no tensor of an empty buffer; a short sequence leaves the last files empty.
    files = [torch.frombuffer(bytearray(name.read_bytes() + b"\0"), dtype=torch.uint8)[:-1] for name in names]
    if not isinstance(target, Striped):
        return files[0]
    found = torch.empty(num_bytes, dtype=torch.uint8)
    for row, start in enumerate(range(0, num_bytes, target.stripe_bytes)):
        stop = min(start + target.stripe_bytes, num_bytes)
        within = row // len(files) * target.stripe_bytes
        found[start:stop] = files[row % len(files)][within : within + stop - start]
    return found
