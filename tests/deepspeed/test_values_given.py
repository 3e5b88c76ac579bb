"""What a program gives the engine that cannot be: a sentence at once, and everything as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.deepspeed.test_engine import batches, loss_of, start

from zoo import sim
from zoo.checkpointing import CheckpointError
from zoo.deepspeed.adapters.root.data import DeepSpeedDataLoader

NO_COUNTS: list[Any] = ["5", None, -3, 2.7, True, [1], torch.ones(2), 10**30]


@pytest.mark.parametrize("name", ["global_steps", "micro_steps", "global_samples", "skipped_steps"])
def test_counts_that_are_set(name: str) -> None:
    engine = start(1, gradient_accumulation_steps=1)
    for wrong in NO_COUNTS:
        with pytest.raises(ValueError, match=rf"engine\.{name} got .*; it takes a whole number"):
            setattr(engine, name, wrong)
        assert getattr(engine, name) == 0
    for right in (3, 3.0, np.int64(3), torch.tensor(3)):
        setattr(engine, name, right)
        assert type(getattr(engine, name)) is int
        assert getattr(engine, name) == 3
    setattr(engine, name, 0)
    engine.backward(loss_of(engine, batches(0, 1)[0]))
    engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (1, 1, 0)


def test_sizes_of_micro_batches() -> None:
    engine = start(1)
    before = engine.get_batch_info()
    for wrong in (True, 10**30, 0, "3", None, 2.5):
        with pytest.raises(ValueError, match=r"set_train_micro_batch_size\(\) got .*; it takes a whole number"):
            engine.set_train_micro_batch_size(wrong)
        assert engine.get_batch_info() == before
    for right in (3, np.int64(3), torch.tensor(3)):
        engine.set_train_micro_batch_size(right)
        assert engine.get_batch_info()[1] == 3
        assert type(engine.get_batch_info()[1]) is int


@pytest.mark.parametrize("wrong", [None, 5, ""])
def test_a_folder_to_load_that_is_none(wrong: Any) -> None:
    engine = start(1)
    with pytest.raises(CheckpointError, match=r"the directory .* it is a path|names no folder"):
        engine.load_checkpoint(wrong)


def test_a_folder_that_one_rank_gives_wrongly_is_told_on_all(tmp_path: Path) -> None:
    def fn(rank: int) -> str:
        engine = start(1)
        with pytest.raises(CheckpointError) as told:
            engine.load_checkpoint(None if rank else tmp_path)
        return str(told.value)

    assert all("rank 1" in text and "is a NoneType; it is a path" in text for text in sim.run(2, fn))


def test_states_to_offload_that_are_none() -> None:
    engine = start(1)
    for wrong in (5, "optim_states"):
        with pytest.raises(ValueError, match=rf"include={wrong!r} is a .*; allowed are 'optim_states'.* in a list"):
            engine.offload_states(wrong)
    with pytest.raises(ValueError, match="include has '5'; allowed are"):
        engine.offload_states([5])


def test_what_makes_no_loader() -> None:
    engine, data = start(1), [1.0, 2.0, 3.0]
    for wrong in ("2", 0, True, 1.5):
        with pytest.raises(ValueError, match=r"the batch_size of deepspeed_io got .*; it takes a whole number"):
            engine.deepspeed_io(data, wrong)
        with pytest.raises(ValueError, match=r"the batch_size of DeepSpeedDataLoader got .*; it takes a whole number"):
            DeepSpeedDataLoader(data, wrong, False, -1, None)
    with pytest.raises(ValueError, match=r"deepspeed_io got collate_fn=5 \(int\); it takes a callable"):
        engine.deepspeed_io(data, 2, collate_fn=5)
    assert len(next(iter(engine.deepspeed_io(data, np.int64(2), route="eval")))) == 2


def test_a_client_state_that_contains_itself(tmp_path: Path) -> None:
    state: dict[str, Any] = {"deep": [1]}
    state["deep"].append(state)

    def fn(rank: int) -> None:
        engine = start(1)
        with pytest.raises(CheckpointError, match="client_state contains itself, or is nested too deeply"):
            engine.save_checkpoint(tmp_path, "one", state if rank else {})
        engine.save_checkpoint(tmp_path, "two", {"right": 1})
        assert engine.load_checkpoint(tmp_path)[1] == {"right": 1}

    sim.run(2, fn)
