"""A rank of a trial.

``FOLDER/config.json`` is the configuration, ``FOLDER/trial.json`` says what is measured; ``FOLDER/rank<r>.json`` is
written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["is_memory_error", "measure", "rank_file", "work"]

MEMORY = ("out of memory", "not enough memory", "cannot allocate memory", "can't allocate memory", "bad_alloc")


def measure(config: Any, *, first: int, last: int, least_s: float) -> dict[str, Any]:
    """Steps of a job. A collective of all ranks.

    Args:
        first: the first step that is measured, from 1. last: the last one.
        least_s: more steps are measured until they took so long in all.

    Returns:
        ``steps_s``, ``waits_s``, what of it this rank waited for a core that others had, and its ``peak_bytes``.
    """
    from zoo.registry import DEFAULT
    from zoo.train.job import Job
    from zoo.train.machine import peak_bytes

    job = Job(config, DEFAULT, quiet=True, monitors=False)
    # Where ranks share cores among themselves their waiting is part of the job.
    shared = job.size * job.threads > len(os.sched_getaffinity(0))
    steps_s: list[float] = []
    waits_s: list[float] = []

    def step() -> None:
        began, waited = time.perf_counter(), _waited_s()
        job.step()
        steps_s.append(time.perf_counter() - began)
        waits_s.append(0.0 if shared else _waited_s() - waited)

    try:
        for _ in range(last):
            step()
        del steps_s[: first - 1], waits_s[: first - 1]
        more = max(0, math.ceil((least_s - sum(steps_s)) / max(1e-6, min(steps_s))))
        for _ in range(min(200, job.world.broadcast_object(more))):  # as many on each rank
            step()
        return {"steps_s": steps_s, "waits_s": waits_s, "peak_bytes": peak_bytes()}
    finally:
        job.engine.destroy()


def _waited_s() -> float:
    """Seconds for which this thread was ready and had no core, since it began (Linux; 0 where nothing says)."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def is_memory_error(error: BaseException) -> bool:
    """Whether there was too little memory, on whatever device."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, (RuntimeError, OSError)) and any(sign in text for sign in MEMORY)
    )


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank says what it came to."""
    return folder / f"rank{rank}.json"


def work(folder: Path, rank: int) -> int:
    """Measure, and say what it came to; the exit code."""
    try:
        from zoo.train import read_config
        from zoo.train.tasks import with_task

        options: Mapping[str, Any] = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
        with contextlib.ExitStack() as stack:
            overrides = stack.enter_context(with_task(options["task"]))
            config = read_config(folder / "config.json", overrides)
            found = measure(config, first=options["first"], last=options["last"], least_s=options["least_s"])
    except Exception as error:
        text = (str(error) or type(error).__name__).strip()
        plain = isinstance(error, (ValueError, NotImplementedError))
        found = {
            "status": "memory" if is_memory_error(error) else "failed",
            "why": (text if plain else f"{type(error).__name__}: {text}").splitlines()[0], "at": time.time(),
        }  # fmt: skip
    _write(rank_file(folder, rank), found)
    return 1 if "status" in found else 0


def _write(path: Path, values: Mapping[str, Any]) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(values), encoding="utf-8")
    os.replace(beside, path)
