"""A step leaves no tensor to Python's collector of circles, whose turn may come much later."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.circles import tensors_in_circles
from tests.data_efficiency import tiny
from tests.data_efficiency.test_random_ltd import section
from tests.pipe.test_engine import batches, engine_of
from tests.pipe.test_training import Case

from zoo import sim


def test_what_is_in_a_circle_is_found() -> None:
    def circle(x: torch.Tensor) -> None:
        kept: list[Any] = [x]
        kept.append(kept)

    gc.disable()
    try:
        circle(torch.ones(2, 2))  # before the context: not its own
        left = torch.ones(4)
        circle(left)
        with tensors_in_circles() as found:
            circle(torch.ones(3, 5))
    finally:
        gc.enable()
    assert found == [(3, 5)]


@pytest.mark.dear
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_pipeline_leaves_none(schedule: str) -> None:
    case = Case(schedule=schedule)
    engines = []  # of both ranks, until the end: an engine is a circle itself

    def job(rank: int) -> None:
        engine = engine_of(case)
        engines.append(engine)
        engine.train_batch(batches(case, engine))  # what is made once may keep what it is made of
        torch.distributed.barrier()
        if rank:
            engine.train_batch(batches(case, engine, 1))
            torch.distributed.barrier()
            return
        with tensors_in_circles() as found:
            engine.train_batch(batches(case, engine, 1))
            torch.distributed.barrier()
        assert found == []

    sim.run(case.pipe, job)


@pytest.mark.dear
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_dropped_tokens_leave_none(stage: int) -> None:
    engine = tiny.start({**section(), "zero_optimization": {"stage": stage}})
    engine.train_batch()
    with tensors_in_circles() as found:
        engine.train_batch()
    assert found == []


@pytest.mark.dear
def test_a_loaded_checkpoint_leaves_none(tmp_path: Path) -> None:
    engine = tiny.start(section())
    engine.train_batch()
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    with tensors_in_circles() as found:
        engine.load_checkpoint(tmp_path)
    assert found == []
