"""Two jobs that take turns, part by part, so that what the machine does in a second it does to both.

:mod:`benchmarks.commits` starts the same worker twice, with zoo of two checkouts. A rank wraps each part that it
measures in ``with turn():``. It waits there until the rank of the same number in the other job has done its part. A job
that is alone never waits.

The two share a folder of named pipes, one for each rank of each job: a byte in it is a turn.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FOLDER, NUMBER = "BENCHMARK_TURNS", "BENCHMARK_JOB"
MANY = 32_768
"""More turns than a job takes, and fewer bytes than a pipe holds."""


def prepare(folder: Path, size: int) -> None:
    """Pipes for two jobs of ``size`` ranks."""
    for rank in range(size):
        for job in range(2):
            os.mkfifo(_pipe(folder, job, rank))


def variables(folder: Path, job: int, first: int) -> dict[str, str]:
    """Of the environment of the ranks of job 0 or 1; job ``first`` begins."""
    return {FOLDER: str(folder), NUMBER: f"{job} {first}"}


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """What is inside runs while the other job waits."""
    pipes = _pipes()
    if pipes is None:
        yield
        return
    mine, other = pipes
    os.read(mine, 1)
    yield
    _all_ranks()
    os.write(other, b".")


def leave() -> None:
    """The other job does not wait any longer."""
    pipes = _pipes()
    if pipes is not None:
        os.write(pipes[1], b"." * MANY)


def _all_ranks() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.barrier()


@cache
def _pipes() -> tuple[int, int] | None:
    """Descriptors of (this rank's own, the other job's); the first job finds its first turn in it."""
    if FOLDER not in os.environ:
        return None
    folder, rank = Path(os.environ[FOLDER]), int(os.environ["RANK"])
    job, first = map(int, os.environ[NUMBER].split())
    mine, other = (os.open(_pipe(folder, number, rank), os.O_RDWR) for number in (job, 1 - job))
    if job == first:
        os.write(mine, b".")
    return mine, other


def _pipe(folder: Path, job: int, rank: int) -> Path:
    return folder / f"job{job}_rank{rank}"
