"""What a run leaves for whoever asks later what it was: the environment, each value's origin, the forecast."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import torch

from zoo.config import Config
from zoo.config.explain import rows_of
from zoo.cost import Forecast

ENVIRONMENT, ORIGINS, FORECAST = "environment.json", "origins.json", "forecast.json"

_VARIABLES = re.compile(r"(ZOO|OMP|MKL|KMP|NCCL|GLOO|CUDA|TORCH|PYTORCH|TORCHELASTIC|ATEN)_|(LOCAL_)?WORLD_SIZE$")
_SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
_PACKAGES = ("numpy", "pydantic", "safetensors", "transformers", "accelerate", "triton")
_LONGEST = 300


def write(out: Path, config: Config, *, forecast: Forecast, threads: int, world_size: int) -> None:
    """The three files; on rank 0."""
    for name, content in (
        (ENVIRONMENT, environment(threads, world_size)),
        (ORIGINS, origins(config)),
        (FORECAST, {"rank": 0, **forecast.to_dict()}),
    ):
        (out / name).write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def origins(config: Config) -> list[list[str]]:
    """[path, value, where it came from] of each value; those that look like a secret are not told."""
    return [
        [path, "not told" if _SECRET.search(path.rpartition(".")[2]) and value else repr(value)[:_LONGEST], source]
        for path, value, source in rows_of(config.items(), config.source)
    ]


def environment(threads: int, world_size: int) -> dict[str, Any]:
    """Versions, the machine of rank 0, and variables that change what a run does; nothing that names who ran it."""
    found: dict[str, Any] = {
        "zoo": _version("zoo-core"), "torch": torch.__version__, "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(), "cores": os.cpu_count(), "cores_allowed": _allowed(),
        "memory_bytes": _memory_bytes(), "ranks": world_size, "threads_per_rank": threads,
        "command": _command(),
    }  # fmt: skip
    found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found |= {"cuda": torch.version.cuda} if torch.version.cuda else {}
    others = {d.metadata["Name"] for d in distributions() if (d.metadata["Name"] or "").startswith("zoo-")}
    packages = {name: _version(name) for name in sorted({*_PACKAGES, *others} - {"zoo-core"})}
    found["packages"] = {name: number for name, number in packages.items() if number is not None}
    found["variables"] = variables(os.environ)
    return found


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """Those that change what a run does."""
    return {
        name: value[:_LONGEST]
        for name, value in sorted(given.items())
        if _VARIABLES.match(name) and not _SECRET.search(name)
    }


def _command() -> str:
    """Without the folder of the program; secrets of ``--set`` are not told."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else []
    told = [re.sub(r"=.*", "=not told", word, flags=re.DOTALL) if _SECRET.search(word) else word for word in words]
    return " ".join(told)[:_LONGEST]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _allowed() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
