"""Measures in a fresh process: one task in the rounds, several in the search and in quick runs. Writes JSON."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.io import files
from benchmarks.io.contenders import DIRECT, Session, contenders
from benchmarks.io.gil import measure_control, measure_gil
from benchmarks.io.points import Point
from benchmarks.launch import answer

WARM_UP_BYTES = 64 << 20
CACHED_LIMIT = 0.01


def cpu_s() -> float:
    """CPU seconds of this process, user and system: all its threads, io_uring's workers, and children that ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def timed(action: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What ``action`` returns, its wall time and the process's CPU time meanwhile."""
    cpu_start, wall_start = cpu_s(), time.perf_counter()
    result = action()
    wall = time.perf_counter() - wall_start
    return result, {"wall_s": wall, "cpu_s": cpu_s() - cpu_start}


def warm_up(session: Session, tensor: torch.Tensor, op: str, path: Path) -> None:
    """A small transfer of the same kind in a file of its own: threads start, libraries allocate what they keep."""
    small, other = tensor[:WARM_UP_BYTES], path.with_name("warm-up")
    session.write(small, other, new=True)
    if op == "read":
        session.read(small, other)
    other.unlink()


def back_memory(num_bytes: int) -> None:
    """Touch memory and give it back, just before the clock starts.

    The host of a virtual machine takes back what lay free for seconds, and the next touch then costs more than ten
    times as much. Who needs new pages for a transfer (page cache, bounce buffers) is not to be charged for that.
    """
    np.ones(2 * num_bytes, dtype=np.uint8)


def measure_write(session: Session, task: dict[str, Any], *, check: bool) -> dict[str, Any]:
    """Write once; "new" to a file that is not there, else over the one that is."""
    path, num_bytes, new = Path(task["path"]), task["num_bytes"], task["op"] == "new"
    tensor = session.buffer(num_bytes)
    files.fill(tensor, task["salt"])
    warm_up(session, tensor, task["op"], path)
    if new:
        path.unlink(missing_ok=True)
    else:
        files.drop_cache(path)
    back_memory(num_bytes)
    _, figures = timed(lambda: session.write(tensor, path, new=new))
    cached = files.cached_share(path)
    if check and not files.file_matches(path, num_bytes, task["salt"]):
        raise RuntimeError(f"{path.name} does not hold what was written")
    return {**figures, "num_bytes": num_bytes, "cached": cached}


def measure_read(session: Session, task: dict[str, Any]) -> dict[str, Any]:
    """Read once, into memory that is there already and holds something else."""
    path, num_bytes = Path(task["path"]), task["num_bytes"]
    tensor = session.buffer(num_bytes)
    tensor.fill_(255)
    warm_up(session, tensor, "read", path)
    files.drop_cache(path)
    back_memory(num_bytes)
    found, figures = timed(lambda: session.read(tensor, path))
    if not files.matches(found, task["salt"]):
        raise RuntimeError(f"what was read is not what {path.name} holds")
    return {**figures, "num_bytes": num_bytes, "cached": files.cached_share(path)}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """One task: "probe" (does it work at all), "write", "new", "read", "gil" or
    "control" (the GIL section beside fio)."""
    if task["op"] == "control":
        return measure_control(task)
    contender = contenders()[task["contender"]]
    if contender.open is None:
        raise ValueError(f"{task['contender']} does not run in a worker")
    session = contender.open(Point(**task["point"]))
    try:
        if task["op"] == "probe":
            return {}
        if task["op"] == "gil":
            return measure_gil(session, task)  # type: ignore[arg-type]
        if task["op"] == "read":
            figures = measure_read(session, task)
        else:
            figures = measure_write(session, task, check=not contender.pt_file)
        if contender.page_cache == DIRECT and figures["cached"] > CACHED_LIMIT:
            raise RuntimeError(
                f"{figures['cached']:.0%} of the file is in the page cache after a transfer that was to go around it: "
                "it fell back to buffered I/O, which is other work (and without an fsync no write)"
            )
        return figures
    finally:
        session.close()


def measure_all(spec: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """One figure for each of the "tasks"; with "go_on" an {"error": …} for those that fail."""
    figures = []
    for task in spec["tasks"]:
        try:
            figures.append(measure(task))
        except Exception as error:
            if not spec.get("go_on"):
                raise
            figures.append({"error": f"{type(error).__name__}: {error}"})
    return figures


if __name__ == "__main__":
    answer(measure_all, joins=False)
