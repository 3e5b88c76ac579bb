"""Law 6 on real processes: kill -9 at any instant of a save; the last checkpoint that was saved loads and verifies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from zoo.checkpointing import CheckpointError, load

KINDS = ("new", "same", "prune", "large", "background")


@contextmanager
def server() -> Iterator[Any]:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpointing.killed"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def killed_after(process: Any, folder: Path, first: int, kind: str, delay_s: float) -> int:
    """The last checkpoint that was said to be saved, before the kill; ``delay_s`` after the first one."""
    process.stdin.write(f"{folder} {first} {kind}\n")
    process.stdin.flush()
    child, last = 0, first - 1
    timer: threading.Timer | None = None
    for line in process.stdout:
        word, *rest = line.split()
        if word == "child":
            child = int(rest[0])
        if word == "saved":
            last = int(rest[0])
        if word == "over":
            break
        if timer is None and child:
            timer = threading.Timer(delay_s, os.kill, (child, signal.SIGKILL))
            timer.start()
    assert timer is not None
    timer.join()
    return last


def check_whole(folder: Path, last: int) -> int:
    """What is there is a checkpoint that was saved, the last one or the one that was under way; all of it."""
    with load(folder) as found:
        number = int(found.scalars["number"])
        for name in found.shapes:
            values = found.tensor(name)
            assert bool((values == float(number)).all()), (name, number)
        for _ in found.verify():
            pass
    assert number in (last, last + 1), (number, last)
    return number


def kill_many(folder: Path, count: int, kinds: tuple[str, ...] = KINDS) -> None:
    dice, rests = random.Random(count), 0
    longest = dict.fromkeys(kinds, 0.05)
    with server() as process:
        for turn in range(count):
            kind = kinds[turn % len(kinds)]
            place = folder / f"{kind}{turn // (20 * len(kinds))}"
            place.mkdir(exist_ok=True)
            try:
                first = check_whole(place, int(load(place).scalars["number"])) + 1
            except CheckpointError:
                first = 1
            began = time.perf_counter()
            last = killed_after(process, place, first, kind, dice.uniform(0.0, longest[kind]))
            longest[kind] = min(0.5, 0.5 * longest[kind] + (time.perf_counter() - began) / max(1, last - first + 1))
            if last >= first or first > 1:
                check_whole(place, last)
            rests += any(path.name.startswith(".") or not (path.parent / "manifest.json").exists()
                         for path in place.glob("*/*"))  # fmt: skip
    assert rests > count // 20  # kills that left something half-written


@pytest.mark.slow
def test_a_drawn_share_of_kills(tmp_path: Path) -> None:
    kill_many(tmp_path, 60)


@pytest.mark.campaign
def test_hundreds_of_kills(tmp_path: Path) -> None:
    kill_many(tmp_path, 600)
