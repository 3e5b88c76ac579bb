"""What the loaders of engine parts promise whatever they pick: passes, one iteration at a time, states."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data_efficiency.tiny import start, weights

from zoo.data_efficiency import DataAnalyzer
from zoo.data_efficiency.batch_loader import PackedLoader, length_of_sample, pad
from zoo.data_efficiency.config import CurriculumMetric, DynamicBatchingConfig
from zoo.data_efficiency.curriculum import Growing
from zoo.data_efficiency.metric_loader import CurriculumLoader
from zoo.engine import ShardedLoader

COUNT = 60
NUMBERS = [torch.tensor([i]) for i in range(COUNT)]
PAIRS = [(torch.full((8,), i % 16), torch.full((8,), i % 16)) for i in range(COUNT)]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index")
    DataAnalyzer(NUMBERS, {"number": int}, path).run()  # type: ignore[arg-type]
    return path / "number"


def growing(index: Path, *, low: int, steps: int, batch: int = 2, **more: Any) -> CurriculumLoader:
    """Numbers up to a limit that grows to all of them, by one or more in each step."""
    section = CurriculumMetric(
        index_to_sample_path=str(index / "index_to_sample.safetensors"),
        index_to_metric_path=str(index / "index_to_metric.safetensors"), min_difficulty=low, max_difficulty=COUNT - 1,
        schedule_config={"total_curriculum_step": steps, "difficulty_step": 1},
    )  # fmt: skip
    return CurriculumLoader(
        NUMBERS, {"number": section}, {"number": Growing(section, "number")}, samples_a_step=batch,
        micro_batch_size=batch, rank=0, size=1, seed=1, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("low", "batch"), [(1, 2), (3, 20)])
def test_passes_are_counted_by_samples_and_not_by_shuffles(index: Path, low: int, batch: int) -> None:
    # The pool changes in every step, or is smaller than one: there are more shuffles than passes.
    loader = growing(index, low=low, steps=COUNT, batch=batch, num_epochs=4)
    drawn = sum(len(rows) for rows in loader)
    assert 4 * COUNT < drawn <= 4 * COUNT + batch
    assert loader.place.epoch > 4
    assert not list(loader), "it ends for good"


# What DeepSpeed 0.19.8 gives on one rank: (samples, micro-batch, num_epochs) → micro-batches of an iteration.
@pytest.mark.parametrize(("size", "batch", "epochs", "expected"), [(28, 2, 1, 15), (29, 2, 1, 15), (14, 2, 2, 15)])
def test_an_iteration_goes_on_to_the_end_of_all_passes(
    size: int, batch: int, epochs: int, expected: int, tmp_path: Path
) -> None:
    numbers: Any = NUMBERS[:size]
    DataAnalyzer(numbers, {"number": int}, tmp_path).run()
    for low in (4, size - 1):  # the pool is small for ever, and all of them
        section = CurriculumMetric(
            index_to_sample_path=str(tmp_path / "number" / "index_to_sample.safetensors"),
            index_to_metric_path=str(tmp_path / "number" / "index_to_metric.safetensors"),
            min_difficulty=low, max_difficulty=low,
            schedule_config={"total_curriculum_step": 5, "difficulty_step": 1},
        )  # fmt: skip
        made = CurriculumLoader(
            numbers, {"number": section}, {"number": Growing(section, "number")}, samples_a_step=batch,
            micro_batch_size=batch, rank=0, size=1, seed=1, num_epochs=epochs,
        )  # fmt: skip
        assert len(made) == expected
        head = list(itertools.islice(made, 3))
        rest = list(made)
        assert len(head) + len(rest) == expected
        drawn, a_shuffle = (
            [row for rows in [*head, *rest] for row in rows.flatten().tolist()],
            (low + 1) // batch * batch,
        )
        for first in range(0, len(drawn), a_shuffle):
            own = drawn[first : first + a_shuffle]
            assert len(own) == len(set(own)), "each sample once before the next shuffle"


def packing(**more: Any) -> PackedLoader:
    section = DynamicBatchingConfig(enabled=True, max_tokens=2, **more)
    return PackedLoader(NUMBERS, section, np.ones(COUNT, dtype=np.int64), rank=0, size=1, seed=1)


@pytest.fixture(params=["curriculum", "packed", "workers"])
def loader(request: pytest.FixtureRequest, index: Path) -> Any:
    if request.param == "packed":
        return packing()
    return growing(index, low=COUNT - 1, steps=1, num_workers=1 if request.param == "workers" else 0)


def test_an_iteration_that_is_not_the_newest_is_refused(loader: Any) -> None:
    one, seen = iter(loader), []
    seen.append(next(one))
    other = iter(loader)
    seen.append(next(other))
    with pytest.raises(RuntimeError, match="not the newest"):
        next(one)
    state = loader.state_dict()
    seen.append(next(other))
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="not the newest"):
        next(other)
    assert torch.equal(next(iter(loader)), seen[2])
    assert not torch.equal(seen[0], seen[1])


def percentiles(index: Path, low: int, steps: int) -> dict[str, Any]:
    """From ``low`` to 100 per cent of the samples in so many steps."""
    metrics = {
        "number": {
            "index_to_sample_path": str(index / "index_to_sample.safetensors"), "difficulty_type": "percentile",
            "min_difficulty": low, "max_difficulty": 100,
            "schedule_config": {"total_curriculum_step": steps, "difficulty_step": 1},
        }
    }  # fmt: skip
    inner = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": metrics}}
    return {"data_efficiency": {"enabled": True, "data_sampling": inner}}


def test_the_record_has_the_difficulty_that_samples_were_drawn_at(index: Path) -> None:
    engine = start(percentiles(index, 10, 40), training_data=PAIRS, layers=1)
    seen = []
    for size in (4, 4, 8, 8, 8):
        engine.set_train_batch_size(size)
        engine.train_batch()
        assert engine.record is not None
        found = engine.record.metrics
        seen.append(found["data_efficiency/number"])
        assert found["data_efficiency/allowed_samples"] == -(-COUNT * seen[-1] // 100)
    assert seen == [12, 14, 19, 23, 28]  # of the steps 1, 2, 4, 6, 8: in samples over train_batch_size


def test_the_engine_goes_on_after_a_look_into_its_loader(index: Path) -> None:
    def run(look: bool) -> list[int]:
        engine = start(percentiles(index, 100, 1), training_data=PAIRS, layers=1)
        found = []
        for step in range(4):
            if look and step == 2:
                next(iter(engine.dataloader))
            engine.train_batch()
            found.append(engine.dataloader.place.samples)
        return found

    assert run(look=False) == [4, 8, 12, 16]
    assert run(look=True) == [4, 8, 16, 20]


def test_states_of_other_loaders_are_refused_before_anything_has_changed(index: Path, tmp_path: Path) -> None:
    packed, sharded, curriculum = packing(), ShardedLoader(NUMBERS, 2), growing(index, low=5, steps=9)  # type: ignore[arg-type]
    for mine, other in ((sharded, packed), (curriculum, packed), (packed, sharded), (packed, curriculum)):
        with pytest.raises(ValueError, match="Continue with"):
            mine.check_state(other.state_dict())
        with pytest.raises(ValueError, match="Continue with"):
            mine.load_state_dict(other.state_dict())
    curriculum.check_state(sharded.state_dict())
    for mine in (sharded, packed, curriculum):
        with pytest.raises(ValueError, match="the loader's state"):
            mine.check_state({"of": "a loader of the user's own"})

    inner = {"enabled": True, "dynamic_batching": {"enabled": True, "max_tokens": 32}}
    engine = start({"data_efficiency": {"enabled": True, "data_sampling": inner}}, training_data=PAIRS, layers=1)
    engine.train_batch()
    engine.save_checkpoint(tmp_path)
    for changes, count in (({}, COUNT), ({"data_efficiency": {"enabled": True, "data_sampling": inner}}, COUNT - 1)):
        again = start(changes, training_data=PAIRS[:count], layers=1)
        before = weights(again)
        with pytest.raises(ValueError, match="Continue with"):
            again.load_checkpoint(tmp_path)
        assert again.global_steps == 0
        assert all(torch.equal(before[name], now) for name, now in weights(again).items())


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        ([3, 1, 2], 3), (([3, 1, 2], "a"), 3), (("a text", [3, 1]), 2), ({"text": "four", "ids": [1, 2, 3]}, 3),
        ({"attention_mask": [1, 1, 0], "input_ids": [5, 6]}, 2), ((torch.tensor(4), np.zeros((5, 2))), 5),
        ({"label": 1, "x": torch.zeros(3)}, 3), ([np.int64(1), np.int64(2)], 2), ([], 0), (([], "a"), 0),
    ],
)  # fmt: skip
def test_the_length_of_a_sample_is_that_of_numbers(sample: Any, length: int) -> None:
    assert length_of_sample(sample) == length


@pytest.mark.parametrize("sample", ["a text", {"text": "a text"}, ("a", "b"), 5, {}, torch.tensor(1), None])
def test_text_has_no_length(sample: Any) -> None:
    with pytest.raises(ValueError, match="cannot tell how many tokens"):
        length_of_sample(sample)


def test_padding_loses_nothing_of_lists_and_arrays() -> None:
    for kind in (list, np.array, torch.tensor):
        for lengths in ((2, 3), (3, 2), (3, 3), (1, 3)):
            rows: list[Any] = [list(range(1, length + 1)) for length in lengths]
            padded = [row + [0] * (max(lengths) - len(row)) for row in rows]
            labels = [row + [-100] * (max(lengths) - len(row)) for row in rows]
            found = pad([{"input_ids": kind(row), "labels": kind(row), "n": len(row)} for row in rows])
            assert found["input_ids"].tolist() == padded
            assert found["labels"].tolist() == labels
            assert found["n"].tolist() == list(lengths)
            x, y = pad([(kind(row), 7) for row in rows])
            assert (x.tolist(), y.tolist()) == (padded, [7, 7])
    for rows in ([[1], []], [[], [1]]):
        assert torch.equal(pad(rows), torch.tensor([row or [0] for row in rows]))
    assert [part.tolist() for part in pad([(1, 2), (3, 4)])] == [[1, 3], [2, 4]]
    with pytest.raises(ValueError, match="a tuple of 2 parts and one of 3"):
        pad([(1, 2), (3, 4, 5)])


def test_padding_changes_no_number() -> None:
    half = [[1, 2], [0.5, 1.5, 2.5]]
    for rows in (half, [np.array(row) for row in half], [torch.tensor(row) for row in half]):
        assert pad(rows).tolist() == [[1, 2, 0], [0.5, 1.5, 2.5]]
    mixed = [torch.tensor([True]), torch.tensor([5, 6]), torch.tensor([1, 2, 3], dtype=torch.int32)]
    assert pad(mixed).tolist() == [[1, 0, 0], [5, 6, 0], [1, 2, 3]]


def test_labels_that_are_no_integers_are_continued_with_zeros() -> None:
    for dtype, end in ((torch.float32, 0), (torch.bool, 0), (torch.int16, -100)):
        rows = [{"labels": torch.ones(length, dtype=dtype)} for length in (1, 2)]
        assert torch.equal(pad(rows)["labels"], torch.tensor([[1, end], [1, 1]], dtype=dtype))
    with pytest.raises(ValueError, match=r"labels are torch.uint8, which cannot hold -100"):
        pad([{"labels": torch.ones(length, dtype=torch.uint8)} for length in (1, 2)])


def test_samples_that_make_no_batch_are_named() -> None:
    few, many = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}
    for rows in ([few, many], [many, few]):
        with pytest.raises(ValueError, match=r"different keys, a.* and a"):
            pad(rows)
    with pytest.raises(ValueError, match=r"shapes \(2, 3\), \(3, 4\); only the first dimension may differ"):
        pad([torch.ones(2, 3), torch.ones(3, 4)])


@pytest.mark.parametrize("verbose", [False, True])
def test_data_that_makes_no_micro_batch_is_refused(verbose: bool) -> None:
    section = {"enabled": True, "max_tokens": 9, "min_batch_size": 3}
    for order in ("dataloader", "random", "seqlen"):
        options = DynamicBatchingConfig(**section, sequence_picking_order=order, verbose=verbose)
        with pytest.raises(ValueError, match="makes 0 micro-batches of at most 9 tokens"):
            PackedLoader(NUMBERS[:2], options, np.ones(2, dtype=np.int64), rank=0, size=1, seed=1)

    class Endless:
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)

    inner = {"enabled": True, "dynamic_batching": {"enabled": True, "max_tokens": 32}}
    with pytest.raises(ValueError, match="Endless without __len__"):
        start({"data_efficiency": {"enabled": True, "data_sampling": inner}}, training_data=Endless())
