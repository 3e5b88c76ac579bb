"""A run whose steps return before anybody knows what they came to: the same run, and nothing bad is saved."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.test_trust import curve, lines
from tests.train.tiny import TinyTask, config

from zoo import sim
from zoo.checkpointing import latest_tag
from zoo.registry import CORE, Registry
from zoo.train import DataEndError, NotFiniteError, StoppedError, train
from zoo.zero import ZeroOptimizer
from zoo.zero.update.clipping import Clipping

BAD = 41
"""A sample of the seventh step."""


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    """Steps are not waited for."""
    ZeroOptimizer._reads_late = True
    yield
    ZeroOptimizer._reads_late = None


def run(out: Path, world: int = 1, task: type[TinyTask] = TinyTask, stage: int = 1, **more: Any) -> list[Any]:
    """With torch's fused AdamW, which is told on the device to skip; ``catches``: what each rank says at the end."""
    catches = more.pop("catches", False)
    own = Registry(CORE, origin="core")
    own.register("task", "tiny", task)
    fused = {"optimizer.params.torch_adam": "true", "optimizer.params.fused": "true"}
    made = config(out, world, {**fused, "zero_optimization.stage": stage, **(more.pop("changes", None) or {})}, **more)

    def job(rank: int) -> Any:
        with pytest.raises(NotFiniteError) if catches else contextlib.nullcontext() as caught:
            return train(made, registry=own)
        return str(caught.value)

    return sim.run(world, job) if world > 1 else [job(0)]


@pytest.mark.dear
@pytest.mark.parametrize("stage", [0, 3])
def test_the_run_is_the_same(tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unread, on_device = [], Clipping.factors_on_device

    def counting(self: Clipping, norm: torch.Tensor) -> Any:
        unread.append(norm)
        return on_device(self, norm)

    monkeypatch.setattr(Clipping, "factors_on_device", counting)
    late = run(tmp_path / "late", 2, stage=stage, validate_every=5)
    assert len(unread) == 11 * 2  # the first step makes states
    ZeroOptimizer._reads_late = False
    waits = run(tmp_path / "waits", 2, stage=stage, validate_every=5)
    assert curve(tmp_path / "late") == curve(tmp_path / "waits")
    assert [set(line) for line in lines(tmp_path / "late")] == [set(line) for line in lines(tmp_path / "waits")]
    assert [result.validation_loss for result in late] == [result.validation_loss for result in waits]
    assert [result.tokens for result in late] == [result.tokens for result in waits]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("every", [1, 4])
def test_a_step_that_is_not_finite_is_found_before_the_next_update(tmp_path: Path, stage: int, every: int) -> None:
    class Bad(TinyTask):
        def __init__(self, *, seed: int) -> None:
            super().__init__(seed=seed, bad=BAD)

    first, said = run(tmp_path / "out", 2, Bad, stage, steps=50, checkpoint_every=every, catches=True)
    assert first == said
    step = len(lines(tmp_path / "out")) + 1
    assert step == 7
    assert f"the loss is nan and the gradient's norm nan at step {step}; the run has stopped" in said
    assert "the first output that is not finite is that of 'log' (Log); its inputs are finite" in said
    saved = (step - 1) // every * every
    assert latest_tag(tmp_path / "out" / "checkpoints") == (f"step_{saved:08d}" if saved else None)


def test_a_signal_saves_what_was_under_way(tmp_path: Path) -> None:
    class Sends(TinyTask):
        def training_data(self) -> Any:
            data, count = super().training_data(), 0

            class Data(torch.utils.data.Dataset[Any]):
                def __len__(self) -> int:
                    return len(data)  # type: ignore[arg-type]

                def __getitem__(self, index: int) -> Any:
                    nonlocal count
                    count += 1
                    if count == 8 * 5 + 3:  # in the sixth step, of which the seventh knows
                        os.kill(os.getpid(), signal.SIGTERM)
                    return data[index]

            return Data()

    with pytest.raises(StoppedError):
        run(tmp_path / "out", 1, Sends)
    assert latest_tag(tmp_path / "out" / "checkpoints") == "step_00000007"
    assert [line["step"] for line in lines(tmp_path / "out")] == list(range(1, 8))


def test_data_that_ends_for_good_loses_no_step(tmp_path: Path) -> None:
    sampling = {"enabled": True, "num_epochs": 1, "dynamic_batching": {"enabled": True, "max_tokens": 12}}
    with pytest.raises(DataEndError, match="ended for good after step 5 of 20; the checkpoint is written"):
        run(tmp_path / "out", 1, changes={
            "data_efficiency.enabled": "true", "data_efficiency.data_sampling": json.dumps(sampling),
            "gradient_accumulation_steps": 3, "train_batch_size": 12,
        }, steps=20)  # fmt: skip
    assert latest_tag(tmp_path / "out" / "checkpoints") == "step_00000005"
    assert [line["step"] for line in lines(tmp_path / "out")] == [1, 2, 3, 4, 5]


def test_the_model_goes_to_the_device_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task makes it on the CPU. Here it goes to a device that nothing can be trained on, which is said."""
    monkeypatch.setattr("zoo.train.job.local_device", lambda: torch.device("meta"))
    with pytest.raises(Exception, match="meta"):
        run(tmp_path)
