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
        ``steps_s``, and ``peak_bytes`` of this rank.
    """
    from zoo.registry import DEFAULT
    from zoo.train.job import Job
    from zoo.train.machine import peak_bytes

    job = Job(config, DEFAULT, quiet=True, monitors=False)
    try:
        seconds: list[float] = []
        for step in range(1, last + 1):
            began = time.perf_counter()
            job.step()
            if step >= first:
                seconds.append(time.perf_counter() - began)
        more = max(0, math.ceil((least_s - sum(seconds)) / max(1e-6, min(seconds))))
        for _ in range(min(200, job.world.broadcast_object(more))):  # as many on each rank
            began = time.perf_counter()
            job.step()
            seconds.append(time.perf_counter() - began)
        return {"steps_s": seconds, "peak_bytes": peak_bytes()}
    finally:
        job.engine.destroy()


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
