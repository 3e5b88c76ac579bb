"""What the machine has: devices, and the memory that a job may take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Device", "bytes_of", "device_named", "memory_limit"]

UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)},
         **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """Where trials run, and how many devices there are."""

    kind: Literal["cpu", "cuda"]
    count: int


def device_named(name: str | None) -> Device:
    """The devices of a kind; of what there is for None.

    Raises:
        ValueError: there is no such kind, or no such device here.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return Device("cuda", gpus) if gpus else Device("cpu", 1)
    if name == "cuda":
        if not gpus:
            raise ValueError('device "cuda": there is no GPU here; trials are real runs, so choose "cpu".')
        return Device("cuda", gpus)
    if name != "cpu":
        raise ValueError(f"device {name!r}; allowed are cpu and cuda.")
    return Device("cpu", 1)


def memory_limit(device: Device) -> int | None:
    """Bytes: of a GPU; on the CPU of the machine, or of the process's control group where that is less. None where
    nothing says."""
    if device.kind == "cuda":
        import torch

        return min(torch.cuda.get_device_properties(n).total_memory for n in range(device.count))
    found = [limit for limit in (_of_machine(), *_of_groups()) if limit is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _of_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """The limits of this process's control group and of those that contain it (both versions)."""
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []
    files = [root / "memory" / "memory.limit_in_bytes"]
    for line in lines:
        number, _, path = line.partition(":")[0], None, line.rsplit(":", 1)[-1].lstrip("/")
        if number == "0":
            place = root / path
            files += [folder / "memory.max" for folder in (place, *place.parents) if folder.is_relative_to(root)]
    found = []
    for file in files:
        try:
            found.append(int(file.read_text(encoding="ascii")))
        except (OSError, ValueError):  # "max", or not there
            continue
    return found


def bytes_of(text: str) -> int:
    """``"8GB"``, ``"500MiB"`` or a number, in bytes. GB is 10⁹, GiB is 2³⁰.

    Raises:
        ValueError: it is none of these.
    """
    number = text.strip().rstrip("KMGTiB").strip()
    unit = text.strip()[len(number) :].strip()
    try:
        found = int(float(number) * UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ValueError(f"memory {text!r}; write a number of bytes, or one like 8GB, 500MB or 16GiB.")
    return found
