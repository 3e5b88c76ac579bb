"""Processors, memory and the limits of this process: what the kernel says."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from zoo.cli.doctor.report import Finding, State, human

ROOT = Path("/")
FEW_FILES = 4096
SMALL_SHM = 512 << 20
SMALL_MEMLOCK = 8 << 20
_UNLIMITED = 1 << 60  # cgroup v1 writes the largest number of pages where nothing is limited
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
_TOLD = ("ZOO_", "NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "TORCH_", "PYTORCH_", "HF_")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def processor(root: Path = ROOT) -> Iterator[Finding]:
    """The CPU, and the memory of the machine."""
    said = _pairs(_read(root / "proc/cpuinfo"))
    flags = set((said.get("flags") or said.get("Features") or "").split())
    known = [flag for flag in _FLAGS if flag in flags]
    name = processor_name(root)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    value = f"{name}, {usable} of {os.cpu_count()} processors for this process; {' '.join(known) or 'no vectors known'}"
    yield Finding(section="devices", name="CPU", value=value, state=State.FACT)
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) > 1:
        yield Finding(section="devices", name="NUMA nodes", value=str(len(nodes)), state=State.FACT)
    memory = _pairs(_read(root / "proc/meminfo"))
    if "MemTotal" in memory:
        total, free = (int(memory.get(key, "0 kB").split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
        yield Finding(
            section="limits", name="memory", value=f"{human(total)}, {human(free)} available", state=State.FACT
        )


def processor_name(root: Path = ROOT) -> str:
    """What the processor calls itself; the kind of machine where it does not."""
    return _pairs(_read(root / "proc/cpuinfo")).get("model name") or platform.machine()


def memory_bytes(root: Path = ROOT) -> int:
    """Of the machine, or what the control group leaves of it; 0 where the kernel does not tell."""
    total = int(_pairs(_read(root / "proc/meminfo")).get("MemTotal", "0 kB").split()[0]) << 10
    limit, _, _ = _memory_limit(root / "sys/fs/cgroup", _groups(root))
    return min(total, limit) if limit is not None else total


def _pairs(text: str) -> dict[str, str]:
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def resources() -> Iterator[Finding]:
    """Limits of the process that ``ulimit`` shows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    small = 0 <= soft < SMALL_MEMLOCK and os.geteuid() != 0
    yield Finding(
        section="limits",
        name="locked memory",
        value=f"{_limit(soft)} (at most {_limit(hard)}); buffers of io_uring count, but not root's",
        state=State.LIMITED if small else State.OK,
        remedy="ulimit -l unlimited  # a container: docker run --ulimit memlock=-1" if small else "",
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < FEW_FILES
    more = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    yield Finding(
        section="limits",
        name="open files",
        value=f"{soft if soft >= 0 else 'unlimited'} (at most {more}); loaders' workers and sockets of ranks take them",
        state=State.LIMITED if few else State.OK,
        remedy=f"ulimit -n {min(65536, hard) if hard >= 0 else 65536}" if few else "",
    )


def _limit(num_bytes: int) -> str:
    return "unlimited" if num_bytes == resource.RLIM_INFINITY else human(num_bytes)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """How much /dev/shm holds. zoo's own shared memory needs none of it; loaders of torch and NCCL do."""
    try:
        system = os.statvfs(path)
    except OSError as error:
        return Finding(
            section="limits", name="shared memory", value=f"{path}: {error.strerror}", state=State.LIMITED,
            remedy="mount -t tmpfs -o size=8g tmpfs /dev/shm  # a container: docker run --shm-size=8g",
        )  # fmt: skip
    size, free = system.f_frsize * system.f_blocks, system.f_frsize * system.f_bavail
    small = size < SMALL_SHM
    return Finding(
        section="limits",
        name="shared memory",
        value=f"{path} holds {human(size)}, {human(free)} free"
        + ("; data loaders and NCCL may not fit" if small else ""),
        state=State.LIMITED if small else State.OK,
        remedy="mount -o remount,size=8g /dev/shm  # a container: docker run --shm-size=8g" if small else "",
    )


def group_limits(root: Path = ROOT) -> Iterator[Finding]:
    """What the control group allows, of versions 1 and 2: the smallest limit on the way up."""
    paths = _groups(root)
    limit, used, where = _memory_limit(root / "sys/fs/cgroup", paths)
    if limit is not None:
        value = f"{human(limit)}, {human(used)} used ({where})"
        yield Finding(section="limits", name="memory of the cgroup", value=value, state=State.FACT)
    elif paths:
        yield Finding(section="limits", name="memory of the cgroup", value="unlimited", state=State.FACT)
    quota = _read(root / "sys/fs/cgroup" / paths.get("", "/").lstrip("/") / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        value = f"{int(quota[0]) / int(quota[1]):.2g} processors by quota"
        yield Finding(section="limits", name="CPU of the cgroup", value=value, state=State.FACT)


def _groups(root: Path) -> dict[str, str]:
    """By controller ("" of version 2) the path of its group."""
    lines = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    return {name: path for _, names, path in lines for name in names.split(",")}


def _memory_limit(base: Path, paths: dict[str, str]) -> tuple[int | None, int, str]:
    found: list[tuple[int, int, str]] = []
    version = (
        (base / "memory", paths["memory"], "memory.limit_in_bytes", "memory.usage_in_bytes")
        if "memory" in paths
        else (base, paths.get("", "/"), "memory.max", "memory.current")
    )
    mount, path, most, now = version
    folder = mount / path.lstrip("/")
    # In a container the path is the host's, and the group itself is mounted at the root.
    for place in (folder, *folder.parents):
        if place != mount and mount not in place.parents:
            break
        text = _read(place / most).strip()
        if text.isdecimal() and int(text) < _UNLIMITED:
            found.append((int(text), int(_read(place / now).strip() or 0), str(place / most)))
    return min(found) if found else (None, 0, "")


def variables() -> Iterator[Finding]:
    """Variables that change what zoo, torch or NCCL do; none that may hold a secret."""
    for name in sorted(os.environ):
        if name.startswith(_TOLD) and not any(word in name for word in _SECRET):
            yield Finding(section="environment", name=name, value=os.environ[name], state=State.FACT)
