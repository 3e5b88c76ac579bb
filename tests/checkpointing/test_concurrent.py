"""Several at work in one directory, in any order of their calls: savers of one tag or of several, and one that prunes.

Each runs on a thread of its own, of which one at a time makes one call to the disk. After each call a reader finds a
whole checkpoint, and so does a machine that is switched off there and on again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.checkpointing.model_disk import ENTRIES, ModelDisk
from tests.checkpointing.test_durability import ROOT, saved, scale_of

from zoo.checkpointing import load, prune


class TakingTurns(ModelDisk):
    """Each call of a worker waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[int, Worker] = {}

    def _pause(self) -> None:
        worker = self.workers.get(threading.get_ident())
        if worker is not None:
            worker.pause()

    def _call(self, what: str) -> None:
        self._pause()
        super()._call(what)

    def open(self, path: Path) -> Any:
        self._pause()
        return super().open(path)

    def names(self, path: Path) -> list[str]:
        self._pause()
        return super().names(path)


class Worker:
    """A job that goes from one call to the next when it is told to."""

    def __init__(self, disk: TakingTurns, job: Callable[[], object]) -> None:
        self._go, self._here = threading.Semaphore(0), threading.Semaphore(0)
        self.over, self.error = False, None
        self._disk, self._job = disk, job
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._here.acquire()

    error: BaseException | None

    def _run(self) -> None:
        self._disk.workers[threading.get_ident()] = self
        self.pause()
        try:
            self._job()
        except BaseException as error:
            self.error = error
        finally:
            del self._disk.workers[threading.get_ident()]
            self.over = True
            self._here.release()

    def pause(self) -> None:
        self._here.release()
        self._go.acquire()

    def step(self) -> None:
        """To the next call, or to its end."""
        if not self.over:
            self._go.release()
            self._here.acquire()

    def end(self) -> None:
        while not self.over:
            self.step()
        self._thread.join()


def save_as(tag: str, scale: float) -> Callable[[TakingTurns], object]:
    return lambda disk: saved(disk, tag, scale)


def pruning(disk: TakingTurns) -> object:
    return prune(ROOT, 1, disk=disk)


JOBS: dict[str, list[Callable[[TakingTurns], object]]] = {
    "one tag": [save_as("new", 2.0), save_as("new", 3.0)],
    "two tags": [save_as("new", 2.0), save_as("other", 3.0)],
    "what is there": [save_as("old", 2.0), save_as("old", 3.0)],
    "pruned": [save_as("new", 2.0), pruning],
    "three": [save_as("new", 2.0), save_as("new", 3.0), pruning],
}


@pytest.mark.dear
@given(kind=st.sampled_from(sorted(JOBS)), order=st.lists(st.integers(0, 2), min_size=20, max_size=90))
@example(kind="one tag", order=[0, 1] * 40)
@example(kind="pruned", order=[1] * 9 + [0] * 40)
def test_a_whole_checkpoint_is_there_at_every_instant(kind: str, order: list[int]) -> None:
    disk = TakingTurns()
    for tag, scale in (("older", 5.0), ("old", 1.0)):
        saved(disk, tag, scale)
    workers = [Worker(disk, lambda job=job: job(disk)) for job in JOBS[kind]]  # type: ignore[misc]
    try:
        for number in order:
            worker = workers[number % len(workers)]
            if worker.over:
                continue
            worker.step()
            assert scale_of(disk) in (1.0, 2.0, 3.0), disk.calls[-1]
            for entries in ENTRIES:
                assert scale_of(disk.after_a_crash(entries)) in (1.0, 2.0, 3.0), (entries, disk.calls[-1])
    finally:
        for worker in workers:
            worker.end()
    assert [worker.error for worker in workers] == [None] * len(workers)
    for tag in disk.names(ROOT):
        if disk.is_directory(ROOT / tag):
            with load(ROOT, tag, disk=disk) as found:
                for _ in found.verify():
                    pass
    assert not [path for path, _ in disk.files() if path.name.startswith(".")]
    assert scale_of(disk) in (2.0, 3.0)


def test_a_checkpoint_that_is_replaced_while_others_are_removed_stays() -> None:
    """prune() has decided that "one" is old; then "one" is saved again."""
    disk = TakingTurns()
    for tag, scale in (("zero", 0.5), ("one", 1.0), ("two", 2.0)):
        saved(disk, tag, scale)
    gone: list[str] = []
    worker = Worker(disk, lambda: gone.extend(prune(ROOT, 1, disk=disk)))
    while not any(call == "remove manifest.json" for call in disk.calls):
        worker.step()
    saved(disk, "zero", 3.0)
    saved(disk, "one", 4.0)
    worker.end()
    assert worker.error is None
    assert len(gone) == 1
    assert scale_of(disk) == 4.0
    assert {scale_of(disk, tag) for tag in disk.names(ROOT) if disk.is_directory(ROOT / tag)} == {2.0, 3.0, 4.0}
