"""A checkpoint that is found to be damaged while it is loaded: on one rank only, and told to all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.engine.test_engine import BASE, Net, _train, stage, start

from zoo import sim
from zoo.checkpointing import CheckpointError, DamageError
from zoo.engine import Engine, initialize


def damage(root: Path, tag: str) -> None:
    """One bit of every tensor's file of the last rank."""
    path = max((root / tag).glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(content[:8], "little")
    content[first + 1] ^= 1
    path.write_bytes(content)


DOES: list[Callable[[Engine, Path], object]] = [
    lambda engine, folder: engine(torch.ones(2, 5), torch.ones(2, 3)),
    lambda engine, folder: engine.eval_batch((torch.ones(2, 5), torch.ones(2, 3))),
    lambda engine, folder: engine.module_state_dict(),
    lambda engine, folder: engine.save_16bit_model(folder),
]
"""What weights that are half of a checkpoint must not be used for."""


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_newest_whole_one_is_loaded_instead(
    tmp_path: Path, number: int, world: int, caplog: pytest.LogCaptureFixture
) -> None:
    def run(rank: int) -> list[float]:
        engine = start(stage(number))
        for tag in ("a", "b"):
            _train(engine, 2)
            engine.save_checkpoint(tmp_path, tag)
        return _train(engine, 2)

    def goes_on(rank: int, tag: str | None) -> list[float]:
        engine = start(stage(number))
        engine.load_checkpoint(tmp_path, tag)
        return _train(engine, 2)

    sim.run(2, run)
    expected = sim.run(world, lambda rank: goes_on(rank, "a"))
    damage(tmp_path, "b")
    with caplog.at_level(logging.WARNING, "zoo.engine"):
        assert sim.run(world, lambda rank: goes_on(rank, None)) == expected
    assert "the checkpoint 'b' is passed over for 'a': loading the checkpoint 'b' into this model failed" in caplog.text
    assert "have another CRC-32C than the index says" in caplog.text


def test_an_engine_whose_checkpoint_was_damaged_does_not_train(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        engine = start(stage(3))
        engine.save_checkpoint(tmp_path, "a")
        _train(engine, 2)
        engine.save_checkpoint(tmp_path / "other", "b")

    sim.run(2, run)
    damage(tmp_path, "a")

    def job(rank: int) -> None:
        engine = start(stage(3))
        for tag in ("a", None):
            with pytest.raises(DamageError) as caught:
                engine.load_checkpoint(tmp_path, tag)
            assert caught.value.everywhere
            words = "an engine that is not loaded: the checkpoint 'a' was found to be damaged while it was loaded"
            with pytest.raises(ValueError, match=words):
                _train(engine, 1)
            with pytest.raises(ValueError, match=words):
                engine.save_checkpoint(tmp_path, "c")
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            engine.load_checkpoint(tmp_path, "none")
        with pytest.raises(ValueError, match="not loaded"):
            _train(engine, 1)
        for does in DOES:
            with pytest.raises(ValueError, match=words):
                does(engine, tmp_path / "out")
        for weights in (start(stage(3)).module_state_dict(), str(tmp_path / "other" / "b")):
            engine.load_module_state_dict(weights)  # states of the optimizer may be half of the damaged one's
            with pytest.raises(ValueError, match=words):
                _train(engine, 1)
        engine.load_checkpoint(tmp_path / "other")
        assert all(torch.isfinite(torch.tensor(_train(engine, 1))))

    sim.run(2, job)


def test_an_engine_that_only_evaluates_computes_nothing_with_half_of_a_checkpoint(tmp_path: Path) -> None:
    engine = start(stage(1))
    engine.save_checkpoint(tmp_path, "a")
    engine.save_checkpoint(tmp_path, "whole")
    damage(tmp_path, "a")
    plain = {key: value for key, value in BASE.items() if key not in ("optimizer", "scheduler")}
    reader = initialize(plain, Net())[0]
    with pytest.raises(DamageError):
        reader.load_checkpoint(tmp_path, "a")
    for does in DOES:
        with torch.no_grad(), pytest.raises(ValueError, match="found to be damaged while it was loaded"):
            does(reader, tmp_path / "out")
    reader.load_checkpoint(tmp_path, "whole")
    for does in DOES:
        with torch.no_grad():
            does(reader, tmp_path / "out")
