"""Programs that fetch batches ahead: rates, metrics and checkpoints are of the batch that trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data_efficiency.test_loaders import PAIRS, index, percentiles
from tests.data_efficiency.test_sampling import Lines, packed
from tests.data_efficiency.tiny import data, start, weights

from zoo import sim
from zoo.engine import Engine, RepeatingLoader

__all__ = ["index"]


def queued(batches: Iterator[Any], ahead: int, *, moved: bool) -> Iterator[Any]:
    """Batches, each of which is used when ``ahead`` more have been fetched; ``moved``: as copies, as on a GPU."""
    fetched = list[Any]()
    while True:
        while len(fetched) <= ahead:
            batch = next(batches)
            fetched.append(tuple(part.clone() for part in batch) if moved else batch)
        yield fetched.pop(0)


def told(engine: Engine, batches: Iterator[Any] | None, steps: int) -> list[tuple[Any, ...]]:
    """Of each step its loss, rate and metrics."""
    found = []
    for _ in range(steps):
        if batches is None:
            engine.train_batch()
        else:
            for _ in range(engine.accumulation):
                engine.backward(engine(*next(batches)))
                engine.step()
        assert engine.record is not None
        found.append((engine.record.loss, engine.record.lr, dict(engine.record.metrics)))
    return found


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("kind", "ahead", "ranks"), [("packed", 1, 2), ("packed", 5, 1), ("metric", 3, 2)])
def test_a_step_is_of_the_batches_that_train(
    kind: str, ahead: int, ranks: int, moved: bool, index: Path, tmp_path: Path
) -> None:
    changes = {**(packed() if kind == "packed" else percentiles(index, 10, 40)), "gradient_accumulation_steps": 2}
    changes["train_batch_size"] = 8

    def begin() -> Engine:
        return start(changes, training_data=Lines(60) if kind == "packed" else PAIRS, layers=1)

    def job(rank: int) -> None:
        expected, engine, again = begin(), begin(), begin()
        ours = told(expected, None, 6)
        assert len({(lr, *numbers.values()) for _, lr, numbers in ours}) > 1
        batches = queued(iter(RepeatingLoader(engine.dataloader)), ahead, moved=moved)
        assert told(engine, batches, 3) == ours[:3]
        engine.save_checkpoint(tmp_path)
        again.load_checkpoint(tmp_path)  # which stands before what was fetched and has not trained
        assert told(again, None, 3) == ours[3:]
        assert told(engine, batches, 3) == ours[3:]
        one, other, third = weights(expected), weights(engine), weights(again)
        assert all(torch.equal(one[n], other[n]) and torch.equal(one[n], third[n]) for n in one)

    sim.run(ranks, job)


def test_batches_out_of_turn_are_refused() -> None:
    engine = start(packed(), training_data=Lines(60), layers=1)
    batches = iter(engine.dataloader)
    first, second, third = (next(batches) for _ in range(3))
    engine.backward(engine(*second))  # one that is left out counts for nothing
    engine.step()
    assert engine.record is not None
    assert engine.record.metrics["data_efficiency/batch_size"] == len(second[0])
    engine.backward(engine(*third))
    engine.step()
    with pytest.raises(ValueError, match="is not of it, or was used before"):
        engine(*first)


def test_a_copy_of_another_size_is_refused() -> None:
    engine = start(packed(), training_data=Lines(60), layers=1)
    batches = iter(engine.dataloader)
    first, *others = (next(batches) for _ in range(9))
    other = next(batch for batch in others if len(batch[0]) != len(first[0]))
    said = f"a batch has {len(other[0])} samples, and the loader's batch, which is next, has {len(first[0])}"
    with pytest.raises(ValueError, match=said):
        engine(*[part.clone() for part in other])


def test_copies_go_on_after_a_load(tmp_path: Path) -> None:
    engine = start(packed(), training_data=Lines(60), layers=1)
    engine.save_checkpoint(tmp_path)
    sizes = []
    for _ in range(2):
        batch = [part.clone() for part in next(iter(engine.dataloader))]
        engine.backward(engine(*batch))
        sizes.append(len(batch[0]))
        engine.zero_grad()
        engine.load_checkpoint(tmp_path)
    assert sizes[0] == sizes[1]


def test_a_step_that_no_batch_was_counted_of_is_refused() -> None:
    engine = start(packed(), training_data=Lines(60), layers=1)
    batch = next(iter(engine.dataloader))
    engine.backward(engine.module(*batch))
    with pytest.raises(ValueError, match="does not know the batches of this step"):
        engine.step()
    engine = start(packed(), training_data=Lines(60), layers=1)
    engine.train_batch()
    engine.eval()
    engine.backward(engine(*next(iter(engine.dataloader))))
    with pytest.raises(ValueError, match="does not know the batches of this step"):
        engine.step()
    unscaled = start(packed(lr_scaling_method="none"), training_data=Lines(60), layers=1)
    unscaled.backward(unscaled(*data()[:4]))
    unscaled.step()
    assert unscaled.record is not None
    assert unscaled.record.metrics["data_efficiency/batch_size"] == 0
