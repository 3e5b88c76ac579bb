"""Data files: where they lie, what is in them, and what of them is in the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

WINDOW = 32 << 20
SPARE = 1 << 20  # beyond the measured bytes: torch.save adds a header and must not extend the file either
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


class DirectoryError(ValueError):
    """The directory is not one to measure in."""


def filesystem(folder: Path) -> str:
    """The type of the filesystem that holds ``folder``, e.g. "ext4", from /proc/self/mountinfo."""
    found, longest = "unknown", -1
    resolved = folder.resolve()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mount = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), left.split()[4]))
        if resolved.is_relative_to(mount) and len(mount.parts) >= longest:
            found, longest = right.split()[0], len(mount.parts)
    return found


def huge_pages() -> str:
    """When the kernel gives transparent huge pages: "always", "madvise" (to who asks), "never" or "unknown"."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found = re.search(r"\[(\w+)\]", setting.read_text()) if setting.exists() else None
    return found[1] if found else "unknown"


@contextlib.contextmanager
def data_folder(parent: Path, needed_bytes: int) -> Iterator[Path]:
    """A new folder under ``parent``, removed with all that is in it at the end.

    Raises:
        DirectoryError: a filesystem in memory, or less room than is needed.
    """
    parent.mkdir(parents=True, exist_ok=True)
    kind = filesystem(parent)
    if kind in IN_MEMORY:
        raise DirectoryError(
            f"{parent} is on {kind}, which is memory and no device: nothing measured there would say anything. Name a "
            "folder on a disk with --directory."
        )
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise DirectoryError(
            f"{parent} has {free / 1e9:.1f} GB left, and {needed_bytes / 1e9:.1f} GB are needed at a time: name "
            "another folder with --directory, or fewer bytes with --size."
        )
    folder = Path(tempfile.mkdtemp(prefix="benchmark-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _block(salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(salt)
    return torch.randint(-(2**63), 2**63 - 1, (WINDOW // 8,), generator=generator)


def fill(tensor: torch.Tensor, salt: int) -> None:
    """Random bytes that no device can leave out or compress: window ``w`` is a random block XOR ``w``, of this salt.

    ``tensor`` is contiguous, uint8, of a multiple of 8 bytes. Two salts differ in nearly every byte.
    """
    words, block = tensor.view(torch.int64), _block(salt)
    for number, window in enumerate(words.split(len(block))):
        torch.bitwise_xor(block[: len(window)], number, out=window)


def matches(tensor: torch.Tensor, salt: int) -> bool:
    """Whether ``tensor`` holds what `fill` writes."""
    words, block = tensor.view(torch.int64), _block(salt)
    return all(
        torch.equal(torch.bitwise_xor(block[: len(window)], number), window)
        for number, window in enumerate(words.split(len(block)))
    )


def file_matches(path: Path, num_bytes: int, salt: int, num_samples: int = 64, piece: int = 256 << 10) -> bool:
    """Whether the file's first ``num_bytes`` are those of `fill`, in evenly spread pieces with the first and last."""
    block = _block(salt).numpy().view(np.uint8)
    piece = min(piece, num_bytes)
    with path.open("rb", buffering=0) as file:
        for sample in range(num_samples):
            offset = (num_bytes - piece) * sample // (num_samples - 1) // 8 * 8
            file.seek(offset)
            read = np.frombuffer(file.read(piece), dtype=np.uint8)
            positions = np.arange(offset, offset + len(read))
            numbers = (positions // WINDOW).astype("<i8")
            expected = block[positions % WINDOW] ^ ((numbers >> (8 * (positions % 8))) & 255).astype(np.uint8)
            if len(read) != piece or not np.array_equal(read, expected):
                return False
    return True


def create(path: Path, num_bytes: int, salt: int) -> None:
    """A file of ``num_bytes`` of `fill` and `SPARE` more, every block written, on the device."""
    block = _block(salt)
    with path.open("wb", buffering=0) as file:
        for number in range(-(-num_bytes // WINDOW)):
            window = torch.bitwise_xor(block, number).view(torch.uint8)[: num_bytes - number * WINDOW]
            write_all(file.fileno(), memoryview(window.numpy()))
        write_all(file.fileno(), memoryview(bytes(range(1, 251)) * (SPARE // 250 + 1))[:SPARE])
        os.fsync(file.fileno())
    drop_cache(path)


def write_all(fd: int, data: memoryview) -> None:
    """``os.write`` until everything is written: one call moves at most 2 GiB."""
    while data:
        data = data[os.write(fd, data) :]


def fsync(path: Path) -> None:
    """Data, metadata and the device's cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def drop_cache(path: Path) -> None:
    """Write back what is dirty, then drop the file's pages from the page cache.

    Raises:
        RuntimeError: pages stayed; a read would be measured from memory.
    """
    fsync(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if (share := cached_share(path)) > 0.01:
        raise RuntimeError(f"{share:.0%} of {path.name} stayed in the page cache after POSIX_FADV_DONTNEED")


def cached_share(path: Path) -> float:
    """The share of the file's pages in the page cache, from mincore(2), which reads nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        num_pages = -(-len(view) // mmap.PAGESIZE)
        resident = np.zeros(num_pages, dtype=np.uint8)
        status = libc.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), ctypes.c_void_p(resident.ctypes.data)
        )
        del view
        if status != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    return float(np.count_nonzero(resident & 1)) / num_pages
