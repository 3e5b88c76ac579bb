"""Saving while training goes on: what is saved is what it was then; failures are told, and nothing is lost."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpointing.model_disk import ModelDisk
from tests.checkpointing.test_checkpoints import check_values, pieces

from zoo import sim
from zoo.checkpointing import BackgroundSaver, CheckpointError, load
from zoo.checkpointing.background import Snapshot
from zoo.comm import Communicator


class Slow(ModelDisk):
    """Nothing is written before ``go``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.go = threading.Event()

    def create(self, path: Path, num_bytes: int) -> Any:
        assert self.go.wait(20)
        return super().create(path, num_bytes)


ROOT = Path("/runs")


def test_what_is_saved_is_what_it_was(tmp_path: Path) -> None:
    disk, saver = Slow(), BackgroundSaver(Communicator())
    state, note, own = pieces(0, 1), {"epoch": [1]}, torch.zeros(3)
    scalars = {"step": 1}
    saver.save(ROOT, "one", state, scalars, note, rank_state={"own": own}, disk=disk)
    for item in state:
        item.tensor.fill_(-7.0)
    note["epoch"].append(2)
    scalars["step"] = 2
    own.fill_(1.0)
    assert saver.pending
    assert list(disk.files()) == []
    threading.Timer(0.1, disk.go.set).start()
    assert load(ROOT, disk=disk).tag == "one"  # waits for it
    saver.wait()
    assert not saver.pending
    found = load(ROOT, disk=disk)
    assert float(found.tensor("a")[0, 1]) == 1.0
    assert found.meta == {"epoch": [1]}
    assert found.scalars == {"step": 1}
    assert found.rank_state(0)["own"].tolist() == [0.0] * 3
    saver.close()


def test_the_next_save_waits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    disk, saver = Slow(), BackgroundSaver(Communicator())
    saver.save(ROOT, "one", pieces(0, 1), disk=disk)
    threading.Timer(0.3, disk.go.set).start()
    with caplog.at_level(logging.WARNING, "zoo.checkpointing"):
        saver.save(ROOT, "two", pieces(0, 1, 2.0), disk=disk)
    assert "saving 'two' has waited 0." in caplog.text
    saver.close()
    assert [float(load(ROOT, tag, disk=disk).tensor("a")[0, 1]) for tag in ("one", "two")] == [1.0, 2.0]


@pytest.mark.parametrize("how", ["save", "wait", "close"])
def test_a_failure_is_logged_at_once_and_raised_at_the_next_call(how: str, caplog: pytest.LogCaptureFixture) -> None:
    disk, saver = ModelDisk(), BackgroundSaver(Communicator())
    saver.save(ROOT, "one", pieces(0, 1), disk=disk)
    saver.wait()
    disk.fail_at = len(disk.calls) + 2, errno.ENOSPC
    saver.save(ROOT, "two", pieces(0, 1), disk=disk)
    assert saver._pending is not None
    saver._pending[1].exception(20)
    assert "saving the checkpoint 'two' in '/runs' failed" in caplog.text
    call = {
        "save": lambda: saver.save(ROOT, "three", pieces(0, 1), disk=disk),
        "wait": saver.wait,
        "close": saver.close,
    }
    with pytest.raises(CheckpointError, match="No space left on device"):
        call[how]()
    assert load(ROOT, disk=disk).tag == "one"
    saver.wait()  # told once
    saver.save(ROOT, "four", pieces(0, 1), disk=disk)
    saver.close()
    assert load(ROOT, disk=disk).tag == "four"


def test_what_cannot_be_held_is_refused_before_anything_begins() -> None:
    saver = BackgroundSaver(Communicator())
    with pytest.raises(CheckpointError, match=r"meta\.f is "):
        saver.save(ROOT, "one", pieces(0, 1), meta={"f": print})
    assert not saver.pending
    saver.close()


def test_memory_is_used_again() -> None:
    snapshot, state = Snapshot(), pieces(0, 1)
    first = snapshot.take(state)
    places = [item.tensor.data_ptr() for item in first]
    size = snapshot.num_bytes
    assert size == sum(item.tensor.nbytes for item in state)
    assert [item.tensor.data_ptr() for item in snapshot.take(state)] == places
    snapshot.take(state[:2])
    assert snapshot.num_bytes < size
    snapshot.drop()
    assert snapshot.num_bytes == 0


def test_simulated_ranks_save_at_once(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        saver = BackgroundSaver(Communicator())
        saver.save(tmp_path, "one", pieces(rank, 2))
        assert not saver.pending
        assert load(tmp_path, comm=Communicator()).tag == "one"
        saver.close()

    sim.run(2, job)
    check_values(tmp_path)


def test_an_interrupted_wait_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread still reads is not overwritten by the next save."""
    disk, saver = Slow(), BackgroundSaver(Communicator())
    saver.save(ROOT, "one", pieces(0, 1), disk=disk)
    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver.wait()
    assert saver.pending
    threading.Timer(0.1, disk.go.set).start()
    saver.save(ROOT, "two", pieces(0, 1, 2.0), disk=disk)
    saver.wait()
    for tag, scale in (("one", 1.0), ("two", 2.0)):
        with load(ROOT, tag, disk=disk) as found:
            assert float(found.tensor("a")[0, 1]) == scale
    saver.close()


def interrupted(*given: Any) -> None:
    raise KeyboardInterrupt


def test_what_cannot_be_held_is_told_before_the_save_returns() -> None:
    saver = BackgroundSaver(Communicator())
    wrong = pieces(0, 1)
    wrong[0] = replace(wrong[0], source=wrong[0].tensor.to(torch.complex32))
    with pytest.raises(CheckpointError, match=r"parameter 'a' is torch\.complex32; a safetensors file holds"):
        saver.save(ROOT, "one", wrong, disk=ModelDisk())
    with pytest.raises(CheckpointError, match=r"'own' is torch\.complex32"):
        saver.save(ROOT, "one", pieces(0, 1), rank_state={"own": torch.zeros(1, dtype=torch.complex32)})
    assert not saver.pending
    saver.close()


def test_a_failure_that_a_load_waited_for_is_still_raised() -> None:
    disk, saver = ModelDisk(fail_at=(3, errno.EIO)), BackgroundSaver(Communicator())
    saver.save(ROOT, "one", pieces(0, 1), disk=disk)
    saver.settle()
    with pytest.raises(CheckpointError, match="Input/output error"):
        saver.wait()
    saver.close()


AT_EXIT = """
import atexit, sys, torch
from zoo.checkpointing import BackgroundSaver
from zoo.comm import Communicator
from zoo.layout import StateSlice

piece = StateSlice("a", "parameter", 0, 4, (4,), torch.ones(4))
saver = BackgroundSaver(Communicator())
saver.save(sys.argv[1], "one", [piece])
atexit.register(lambda: saver.save(sys.argv[1], "two", [piece]))
"""


@pytest.mark.dear
def test_a_save_when_the_interpreter_ends_is_written(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", AT_EXIT, str(tmp_path)], check=True, timeout=120)
    assert {load(tmp_path, tag).tag for tag in ("one", "two")} == {"one", "two"}
