"""``client_state`` of each rank: it comes back to the rank that has kept it; ranks that there were not get rank 0's."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zoo.deepspeed
from zoo import checkpointing, sim
from zoo.checkpointing.client_state import OF_RANK
from zoo.checkpointing.resharding import reshard
from zoo.engine import initialize

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2},
}  # fmt: skip
STATES = st.sampled_from([None, {}, {"a": 1}, {"a": 1.0}, {"path": Path("x"), 3: (1, {2})}, {"numbers": np.arange(3)}])


def engine_of(document: dict[str, Any] = CONFIG, facade: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    return zoo.deepspeed.initialize(model=model, config=document)[0] if facade else initialize(document, model)[0]


def save(folder: Path, states: list[Any], facade: bool = False, **how: Any) -> None:
    def job(rank: int) -> None:
        engine = engine_of(facade=facade)
        engine.save_checkpoint(folder, "t", client_state=states[rank], **how)
        if not facade:
            engine.wait_for_checkpoint()

    sim.run(len(states), job)


def loaded(folder: Path, world: int, document: dict[str, Any] = CONFIG, facade: bool = False) -> list[Any]:
    return sim.run(world, lambda rank: engine_of(document, facade).load_checkpoint(folder, "t")[1])


def same(found: Any, kept: Any) -> bool:
    """With the types."""
    return repr(found) == repr(dict(kept or {}))


@given(
    st.lists(STATES, min_size=1, max_size=3), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_each_rank_has_its_own(states: list[Any], world: int, facade: bool, trains: bool, background: bool) -> None:
    document = CONFIG if trains else {k: v for k, v in CONFIG.items() if k != "optimizer"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder, states, facade, **({} if facade else {"asynchronous": background}))
        for rank, found in enumerate(loaded(folder, world, document, facade)):
            assert same(found, states[rank] if rank < len(states) else states[0])


def test_what_all_have_alike_is_kept_once(tmp_path: Path) -> None:
    save(tmp_path, [{"a": 1}] * 3)
    with checkpointing.load(tmp_path, "t") as found:
        assert found.meta["client"] == {"a": 1}
        assert "client_ranks" not in found.meta
        assert not any(OF_RANK in found.rank_state(rank) for rank in range(3))


def test_what_a_rank_has_that_cannot_be_held_is_refused(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        with pytest.raises(ValueError, match=r"rank 1: meta\.client\.it is of the type .*Linear, which a checkpoint"):
            engine_of().save_checkpoint(tmp_path, client_state={"it": nn.Linear(1, 1)} if rank else {})

    sim.run(2, job)


def test_damage_is_told_on_all_ranks(tmp_path: Path) -> None:
    save(tmp_path, [{"a": 1}, {"mark": "here" * 4}])
    file = next(path for path in (tmp_path / "t").iterdir() if b"herehere" in path.read_bytes())
    file.write_bytes(file.read_bytes().replace(b"herehere", b"herethere"[:8]))

    def job(rank: int) -> None:
        with pytest.raises(checkpointing.CheckpointError, match="rank 1: "):
            engine_of().load_checkpoint(tmp_path, "t")

    sim.run(2, job)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_written_anew_for_other_ranks(ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states: list[Any] = [{"a": 1}, {"a": 2}, {"a": 3}]
    save(tmp_path / "from", states)
    with checkpointing.load(tmp_path / "from", "t") as found, caplog.at_level(logging.WARNING):
        reshard(found, tmp_path / "to", ranks)
    assert ("client_state of rank(s) 2 is left out" in caplog.text) is (ranks == 2)
    assert ("client_state of rank(s) 1, 2 is left out" in caplog.text) is (ranks == 1)
    for rank, found_state in enumerate(loaded(tmp_path / "to", 4)):
        assert found_state == (states[rank] if rank < min(ranks, 3) else states[0])
