"""What does not change is written once, and is in every checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpointing.model_disk import ENTRIES, ModelDisk, PowerLossError
from tests.profiles import examples
from torch import nn

from zoo import sim
from zoo.checkpointing import BackgroundSaver, load, prune, save, zero_to_fp32
from zoo.checkpointing.constants import Constants
from zoo.checkpointing.format.disk import LocalDisk
from zoo.comm import Communicator
from zoo.engine import initialize
from zoo.layout import StateSlice

ROOT = Path("/runs")


def parts(rank: int, size: int, base: float, head: float) -> list[StateSlice]:
    """A frozen tensor of 12 elements, and one that trains."""
    each = 12 // size
    run = rank * each
    return [
        StateSlice("base", "parameter", run, each, (12,), torch.arange(run, run + each) * base, constant=True),
        StateSlice("head", "parameter", run, each, (12,), torch.arange(run, run + each) * head),
    ]


def check(found: Any, base: float, head: float) -> None:
    assert torch.equal(found.tensor("base"), torch.arange(12) * base)
    assert torch.equal(found.tensor("head"), torch.arange(12) * head)
    assert sum(1 for _ in found.verify()) == len(found.index.files)


def constants_of(folder: Path) -> dict[str, int]:
    return {path.name.split(".")[2]: path.stat().st_ino for path in folder.glob("*.constant.*")}


@pytest.mark.matrix
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_file_that_has_not_changed_gets_a_second_name(tmp_path: Path, size: int) -> None:
    def job(rank: int) -> None:
        known = Constants()
        for step, base in enumerate((1.0, 1.0, 2.0, 2.0)):
            part = parts(rank, size, base, float(step))
            save(tmp_path, f"s{step}", part, comm=Communicator(), constants=known)

    sim.run(size, job)
    files = [constants_of(tmp_path / f"s{step}") for step in range(4)]
    assert len(files[0]) == size
    assert files[0] == files[1]
    assert files[2] == files[3]
    # A rank whose own part is zeros has not changed it.
    assert all(files[1][rank] != files[2][rank] for rank in files[0] if size == 1 or rank != "00000")
    for step, base in enumerate((1.0, 1.0, 2.0, 2.0)):
        with load(tmp_path, f"s{step}") as found:
            check(found, base, float(step))
        alone = zero_to_fp32.Checkpoint(tmp_path, f"s{step}")
        assert torch.equal(alone.read("base", "parameter", 0, 12), torch.arange(12) * base)
        alone.close()
    assert prune(tmp_path, 1) == ["s0", "s1", "s2"]
    with load(tmp_path) as found:
        check(found, 2.0, 3.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "s3"]


@examples(times=2)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from([1.0, 2.0]), st.sampled_from(["s0", "s1"]), st.sampled_from(["", "prune", "gone"])),
        min_size=1, max_size=6,
    ),
    background=st.booleans(),
)  # fmt: skip
def test_whatever_happens_in_between_each_checkpoint_has_its_own_values(
    steps: list[tuple[float, str, str]], background: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saver, known = BackgroundSaver(Communicator()), Constants()
        there: dict[str, tuple[float, float]] = {}
        for number, (base, tag, event) in enumerate(steps):
            state = parts(0, 1, base, float(number))
            if background:
                saver.save(folder, tag, state)
                for item in state:
                    item.tensor.fill_(-1.0)
            else:
                save(folder, tag, state, constants=known)
            there[tag] = base, float(number)
            saver.wait()
            if event == "prune":
                for gone in prune(folder, 1):
                    del there[gone]
            elif event == "gone":
                shutil.rmtree(Path(folder) / tag)
                del there[tag]
        for tag, (base, head) in there.items():
            with load(folder, tag) as found:
                check(found, base, head)
        saver.close()


@pytest.mark.matrix
@pytest.mark.parametrize("entries", ENTRIES)
def test_after_a_crash_at_any_call_the_last_checkpoint_is_whole(entries: str) -> None:
    count = 0
    while True:
        disk, known = ModelDisk(), Constants()
        save(ROOT, "one", parts(0, 1, 1.0, 1.0), constants=known, disk=disk)
        disk.crash_at = len(disk.calls) + count
        try:
            save(ROOT, "two", parts(0, 1, 1.0, 2.0), constants=known, disk=disk)
            crashed = False
        except PowerLossError:
            crashed = True
        disk.crash_at = None
        with load(ROOT, disk=disk.after_a_crash(entries)) as found:
            check(found, 1.0, 1.0 if found.tag == "one" else 2.0)
            assert crashed or found.tag == "two"
        if not crashed:
            assert any(call.startswith("link ") for call in disk.calls)
            return
        count += 1


def test_a_file_system_without_second_names_gets_the_file_again(tmp_path: Path) -> None:
    class Plain(LocalDisk):
        def link(self, path: Path, target: Path) -> bool:
            return False

    known = Constants()
    for step in range(2):
        save(tmp_path, f"s{step}", parts(0, 1, 1.0, float(step)), constants=known, disk=Plain())
    assert constants_of(tmp_path / "s0") != constants_of(tmp_path / "s1") != {}
    with load(tmp_path) as found:
        check(found, 1.0, 1.0)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.head = nn.Linear(64, 64), nn.Linear(64, 1)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(x))).square().mean()


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_frozen_parameters_of_an_engine_are_written_once(tmp_path: Path, stage: int, asynchronous: bool) -> None:
    def start() -> Any:
        config = {
            "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage}, "checkpoint": {"asynchronous": asynchronous},
        }  # fmt: skip
        return initialize(config, Adapted())[0]

    def job(rank: int) -> None:
        engine, dice = start(), torch.Generator().manual_seed(rank)
        batches = [torch.randn(1, 64, generator=dice) for _ in range(5)]
        for x in batches[:3]:
            engine.train_batch(iter([x]))
            engine.save_checkpoint(tmp_path)
        expected = [float(engine.train_batch(iter([x]))) for x in batches[3:]]
        again = start()
        again.load_checkpoint(tmp_path)
        assert [float(again.train_batch(iter([x]))) for x in batches[3:]] == expected
        again.destroy()
        engine.destroy()

    sim.run(2, job)
    files = [constants_of(tmp_path / f"global_step{step}") for step in (1, 2, 3)]
    assert files[0] == files[1] == files[2] != {}
