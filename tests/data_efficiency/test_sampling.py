"""Which samples a micro-batch has: pools that grow with a metric, and micro-batches packed by tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data_efficiency.tiny import BASE, Tiny, data, stage, start, weights
from tests.profiles import examples
from torch.utils.data import Dataset

from zoo import sim
from zoo.config import ConfigError
from zoo.data_efficiency import DataAnalyzer
from zoo.data_efficiency.batch_loader import PackedLoader, length_of_sample, pack, pad
from zoo.data_efficiency.config import DynamicBatchingConfig
from zoo.data_efficiency.metric_loader import CurriculumLoader
from zoo.engine import Engine, ShardedLoader

COUNT = 32


def first_word(sample: Any) -> int:
    return int(sample[0][0])


def last_word(sample: Any) -> int:
    return int(sample[0][-1])


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index")
    DataAnalyzer(data(COUNT), {"first": first_word, "last": last_word}, path).run()
    return path


def metric(path: Path, name: str = "first", **changes: Any) -> dict[str, Any]:
    return {
        "index_to_sample_path": str(path / name / "index_to_sample.safetensors"),
        "index_to_metric_path": str(path / name / "index_to_metric.safetensors"),
        "difficulty_type": "value", "clustering_type": "schedule_based", "min_difficulty": 4, "max_difficulty": 15,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 1},
        **changes,
    }  # fmt: skip


def sampling(metrics: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    curriculum = {"enabled": True, "curriculum_metrics": metrics} if metrics is not None else {}
    inner = {"enabled": True, "curriculum_learning": curriculum, **more}
    return {"data_efficiency": {"enabled": True, "data_sampling": inner}}


class Watch(Tiny):
    """Remembers what it was trained on."""

    def __init__(self) -> None:
        super().__init__(1)
        self.batches: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.batches.append(x.clone())
        return super().forward(x, y)


def loader_of(engine: Engine) -> Any:
    return engine.dataloader


def test_samples_come_from_the_pool_of_the_step(indexed: Path) -> None:
    engine = start(sampling({"first": metric(indexed)}), model=Watch(), training_data=data(COUNT))
    assert isinstance(engine.dataloader, CurriculumLoader)
    all_first = [first_word(data(COUNT)[i]) for i in range(COUNT)]
    highest = []
    for step in range(1, 13):
        engine.train_batch()
        limit = min(15, math.floor(step / 8 * 11 + 4))
        seen = engine.module.batches[-1][:, 0]
        highest.append(int(seen.max()))
        assert seen.max() <= limit
        assert engine.record is not None
        assert engine.record.metrics["data_efficiency/first"] == limit
        assert engine.record.metrics["data_efficiency/allowed_samples"] == sum(v <= limit for v in all_first)
    assert max(highest[-4:]) > 8


def test_percentiles_and_several_metrics(indexed: Path) -> None:
    percent = metric(
        indexed, "last", difficulty_type="percentile", min_difficulty=50, max_difficulty=50, index_to_metric_path=None
    )
    both = {"first": metric(indexed, min_difficulty=9, max_difficulty=9), "last": percent}
    engine = start(sampling(both), model=Watch(), training_data=data(COUNT))
    samples = [data(COUNT)[i] for i in range(COUNT)]
    easiest = sorted(range(COUNT), key=lambda i: (last_word(samples[i]), i))[: COUNT // 2]
    allowed = {tuple(samples[i][0].tolist()) for i in easiest if first_word(samples[i]) <= 9}
    for _ in range(12):
        engine.train_batch()
    seen = {tuple(row.tolist()) for batch in engine.module.batches for row in batch}
    assert seen <= allowed
    assert len(seen) > len(allowed) / 2
    assert engine.record is not None
    assert engine.record.metrics["data_efficiency/allowed_samples"] == len(allowed)


def test_while_the_pool_stays_every_sample_comes_once_a_shuffle(indexed: Path) -> None:
    options = metric(indexed, min_difficulty=8, max_difficulty=8)
    loader = start(sampling({"first": options}), training_data=data(COUNT)).dataloader
    loader.unused = None  # it is used without its engine
    batches, seen = iter(loader), []
    next(batches)  # the pool is known from now on
    loader.load_state_dict({**loader.state_dict(), "position": 0})
    batches = iter(loader)
    for _ in range(3):
        seen.append([tuple(row.tolist()) for x, _ in itertools.islice(batches, loader.allowed // 4) for row in x])
        assert len(seen[-1]) == len(set(seen[-1])) == loader.allowed // 4 * 4
    assert seen[0] != seen[1]


def test_with_all_samples_allowed_nothing_changes(indexed: Path) -> None:
    def run(changes: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
        engine = start(changes, training_data=data(COUNT))
        return [float(engine.train_batch()) for _ in range(20)], weights(engine)

    plain = run({})
    for options in (
        metric(indexed, min_difficulty=15),
        metric(indexed, min_difficulty=100, max_difficulty=100, difficulty_type="percentile"),
    ):  # fmt: skip
        changed = run(sampling({"first": options}))
        assert plain[0] == changed[0]
        assert all(torch.equal(plain[1][name], changed[1][name]) for name in plain[1])


@pytest.mark.parametrize("number", [0, 3])
def test_a_growing_pool_resumes_exactly_and_at_other_world_sizes(number: int, indexed: Path, tmp_path: Path) -> None:
    changes = {**sampling({"first": metric(indexed)}), **stage(number)}

    def begin() -> Engine:
        return start(changes, model=Watch(), training_data=data(COUNT))

    def job(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
        engine = begin()
        for step in range(9):
            if step == 5:
                engine.save_checkpoint(tmp_path)
            engine.train_batch()
        again = begin()
        again.load_checkpoint(tmp_path)
        for _ in range(4):
            again.train_batch()
        one, other = weights(engine), weights(again)
        return engine.module.batches[5:], again.module.batches, all(torch.equal(one[n], other[n]) for n in one)

    ranks = sim.run(2, job)
    for batches, resumed, same in ranks:
        assert all(torch.equal(a, b) for a, b in zip(batches, resumed, strict=True))
        assert same
    alone = begin()
    alone.load_checkpoint(tmp_path)
    for step in range(4):
        alone.train_batch()
        assert torch.equal(alone.module.batches[step], torch.cat([ranks[0][0][step], ranks[1][0][step]]))


def test_a_pool_smaller_than_a_step_is_gone_through_again(indexed: Path) -> None:
    options = metric(indexed, min_difficulty=1, max_difficulty=1)
    engine = start({**sampling({"first": options}), "train_batch_size": 16}, model=Watch(), training_data=data(COUNT))
    engine.train_batch()
    allowed = engine.dataloader.allowed
    assert allowed < 16
    rows = [tuple(row.tolist()) for row in engine.module.batches[0]]
    assert len(rows) == 16
    assert len(set(rows)) == allowed


def test_what_cannot_be_drawn_from_is_refused(indexed: Path) -> None:
    class Empty(Dataset[Any]):
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int) -> Any:
            return torch.full((2,), 5), torch.full((2,), 5)

    DataAnalyzer(Empty(), {"first": first_word}, indexed / "fives").run()
    engine = start(
        sampling({"first": metric(indexed / "fives")}), training_data=Empty(), model=Tiny(1)
    )  # fmt: skip
    engine.train_batch()  # difficulty 5
    lower = metric(indexed / "fives", min_difficulty=1, max_difficulty=1)
    with pytest.raises(ValueError, match="allows no sample at difficulty 1"):
        start(sampling({"first": lower}), training_data=Empty()).train_batch()
    with pytest.raises(ValueError, match="is of 32 samples, and the data set has 31"):
        start(sampling({"first": metric(indexed)}), training_data=data(31))
    with pytest.raises(ConfigError, match="index_to_sample_path is missing"):
        start(sampling({"first": {"max_difficulty": 3, "schedule_type": "custom"}}))
    with pytest.raises(ConfigError, match="curriculum_metrics is empty"):
        start(sampling({}))
    with pytest.raises(ValueError, match="the engine has made no loader"):
        start(sampling({"first": metric(indexed)}), training_data=None).train_batch(iter([tuple(data()[:4])]))


@pytest.mark.parametrize(("name", "samples"), [("seqlen_truncate", 4), ("seqlen_reshape", 8)])
def test_metrics_that_cut_sequences(name: str, samples: int) -> None:
    options = {
        "clustering_type": "single_cluster", "difficulty_type": "value", "min_difficulty": 4, "max_difficulty": 4,
        "schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [4], "max_step": []},
    }  # fmt: skip
    engine = start(sampling({name: options}), layers=1)
    assert isinstance(engine.dataloader, ShardedLoader)
    engine.train_batch()
    assert engine.module.lengths == [4]
    assert engine.record is not None
    assert engine.record.samples == samples
    assert engine.record.metrics[f"data_efficiency/{name}"] == 4


# -- micro-batches packed by tokens -----------------------------------------------------------------------------------


@examples(times=10)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 60), st.none() | st.integers(1, 5),
)  # fmt: skip
def test_packing(lengths: list[int], max_tokens: int, largest: int | None) -> None:
    edges = pack(np.array(lengths), np.arange(len(lengths)), max_tokens=max_tokens, largest=largest).tolist()
    assert (edges[0], edges[-1]) == (0, len(lengths))
    for start_, stop in itertools.pairwise(edges):
        assert 0 < stop - start_ <= (largest or len(lengths))
        assert sum(lengths[start_:stop]) <= max_tokens
        full = stop == len(lengths) or sum(lengths[start_ : stop + 1]) > max_tokens
        assert full or stop - start_ == largest


def test_packing_with_a_smallest_size() -> None:
    assert pack(np.array([3, 3, 3, 3, 3]), np.arange(5), max_tokens=6, smallest=2).tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="2 samples from number 0 on have 10 tokens, more than max_tokens = 9"):
        pack(np.array([1, 2, 9, 1]), np.array([0, 2, 1, 3]), max_tokens=9, smallest=2)
    with pytest.raises(ValueError, match="1 sample from number 1 on have 12 tokens"):
        pack(np.array([1, 12]), np.arange(2), max_tokens=9)


class Lines(Dataset[Any]):
    """Sequences of 2 to 8 words."""

    def __init__(self, count: int = 40) -> None:
        dice = torch.Generator().manual_seed(2)
        lengths = torch.randint(2, 9, (count,), generator=dice).tolist()
        self.items = [torch.randint(16, (length,), generator=dice) for length in lengths]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index], (self.items[index] + 3) % 16


def packed(**more: Any) -> dict[str, Any]:
    return sampling(None, dynamic_batching={"enabled": True, "max_tokens": 20, **more})


@given(st.integers(1, 4), st.sampled_from(["dataloader", "random", "seqlen"]), st.integers(0, 6))
def test_ranks_share_the_micro_batches_of_an_epoch(size: int, order: str, before: int) -> None:
    section = DynamicBatchingConfig(enabled=True, max_tokens=20, sequence_picking_order=order)
    lines = Lines()
    lengths = np.array([length_of_sample(lines[i]) for i in range(len(lines))])

    def loaders(count: int) -> list[PackedLoader]:
        return [
            PackedLoader(lines, section, lengths, rank=r, size=count, seed=3, collate_fn=list) for r in range(count)
        ]

    (alone,) = loaders(1)
    expected = [[tuple(x.tolist()) for x, _ in batch] for batch in alone]
    assert sorted(itertools.chain.from_iterable(expected)) == sorted(tuple(x.tolist()) for x, _ in lines)
    assert all(sum(map(len, batch)) <= 20 for batch in expected)
    ranks = loaders(size)
    found: list[list[tuple[int, ...]]] = []
    iterators: list[Iterator[Any]] = [iter(loader) for loader in ranks]
    turns = min(before, len(ranks[0]))
    for _ in range(turns):
        step = [[tuple(x.tolist()) for x, _ in next(i)] for i in iterators]
        assert [loader.handed for loader in ranks] == [sum(map(len, step))] * size
        found += step
    (rest,) = loaders(1)  # the others' position, at another number of ranks
    rest.load_state_dict(ranks[0].state_dict())
    found += [[tuple(x.tolist()) for x, _ in batch] for batch in rest]
    assert found == expected
    assert len({len(loader) for loader in ranks}) == 1


@pytest.mark.matrix
@pytest.mark.parametrize(("method", "power"), [("linear", 1.0), ("sqrt", 0.5), ("none", 0.0)])
def test_the_rate_that_is_used_follows_the_samples_of_the_step(method: str, power: float) -> None:
    changes = {**packed(lr_scaling_method=method), "gradient_accumulation_steps": 2, "train_batch_size": 8}

    def job(rank: int) -> list[tuple[float, float, int]]:
        engine = start(changes, model=Watch(), training_data=Lines(60))
        found = []
        for _ in range(4):
            engine.train_batch()
            assert engine.record is not None
            found.append(
                (engine.record.lr[0], engine.record.metrics["data_efficiency/batch_size"], engine.record.samples)
            )
            assert engine.get_lr() == [0.02]
        return found

    first, second = sim.run(2, job)
    assert first == second
    assert len({samples for _, _, samples in first}) > 1
    for rate, counted, samples in first:
        assert counted == samples
        assert rate == pytest.approx(0.02 * (samples / 8) ** power)


@pytest.mark.parametrize("number", [0, 3])
def test_packed_micro_batches_resume_exactly(number: int, tmp_path: Path) -> None:
    changes = {**packed(sequence_picking_order="seqlen"), **stage(number)}

    def job(rank: int) -> tuple[list[float], list[float], bool]:
        engine = start(changes, training_data=Lines(60), layers=1)
        losses = []
        for step in range(9):
            if step == 4:
                engine.save_checkpoint(tmp_path)
            losses.append(float(engine.train_batch()))
        again = start(changes, training_data=Lines(60), layers=1)
        again.load_checkpoint(tmp_path)
        more = [float(again.train_batch()) for _ in range(5)]
        one, other = weights(engine), weights(again)
        return losses[4:], more, all(torch.equal(one[n], other[n]) for n in one)

    for losses, more, same in sim.run(2, job):
        assert losses == more
        assert same
    with pytest.raises(ValueError, match="Continue with the data set and the options"):
        start({**packed(), **stage(number)}, training_data=Lines(60), layers=1).load_checkpoint(tmp_path)


def test_lengths_come_from_the_analyser(tmp_path: Path) -> None:
    DataAnalyzer(Lines(), {"seqlen": lambda sample: len(sample[0])}, tmp_path).run()
    with_index = start(packed(metrics_path=str(tmp_path)), training_data=Lines()).dataloader
    measured = start(packed(), training_data=Lines()).dataloader
    assert with_index.edges().tolist() == measured.edges().tolist()
    with pytest.raises(ValueError, match="analyse this data set"):
        start(packed(metrics_path=str(tmp_path)), training_data=Lines(41))


def test_a_step_that_begins_anew_counts_once() -> None:
    engine = start({**packed(), "gradient_accumulation_steps": 2}, training_data=Lines(60), layers=1)
    batches = iter(loader_of(engine))
    sizes = []
    for take in (1, 2):  # the first micro-batch is dropped
        sizes = []
        for _ in range(take):
            batch = next(batches)
            sizes.append(len(batch[0]))
            engine.backward(engine(*batch))
            if take == 1:
                engine.zero_grad()
            else:
                engine.step()
    assert engine.record is not None
    assert engine.record.metrics["data_efficiency/batch_size"] == sum(sizes)
    assert engine.record.lr[0] == pytest.approx(0.02 * sum(sizes) / BASE["train_batch_size"])


def test_padding() -> None:
    samples = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, 2]), "n": 1}]
    samples.append({"input_ids": torch.tensor([3]), "labels": torch.tensor([3]), "n": 2})
    batch = pad(samples)
    assert batch["input_ids"].tolist() == [[1, 2], [3, 0]]
    assert batch["labels"].tolist() == [[1, 2], [3, -100]]
    assert batch["n"].tolist() == [1, 2]
    assert [length_of_sample(s) for s in (samples[0], (torch.ones(3, 2), 1), [1, 2, 3, 4])] == [2, 3, 4]
    with pytest.raises(ValueError, match="cannot tell how many tokens"):
        length_of_sample(5)


def test_batches_of_another_loader_are_refused() -> None:
    batch = tuple(data()[:4])
    with pytest.raises(ValueError, match="is not of it"):
        start(packed(), training_data=Lines()).train_batch(iter([batch]))
    start(packed(lr_scaling_method="none"), training_data=Lines()).train_batch(iter([batch]))
    with pytest.raises(ConfigError, match="max_tokens is missing"):
        start(sampling(None, dynamic_batching={"enabled": True}))
    with pytest.raises(ConfigError, match="no loader of this section reads samples"):
        start(sampling(None, num_workers=2))
    with pytest.raises(ValueError, match="an engine part makes the loader"):
        start(packed(), training_data=Lines(), loader={"num_workers": 1})


@pytest.mark.parametrize("kind", ["metric", pytest.param("packed", marks=pytest.mark.slow)])
def test_workers_that_read_ahead_change_nothing(kind: str, indexed: Path, tmp_path: Path) -> None:
    def begin(workers: int) -> Engine:
        changes = sampling({"first": metric(indexed)}) if kind == "metric" else packed()
        changes["data_efficiency"]["data_sampling"]["num_workers"] = workers
        return start(changes, model=Watch(), training_data=data(COUNT) if kind == "metric" else Lines(60))

    plain, ahead = begin(0), begin(1)
    for engine in (plain, ahead):
        for _ in range(4):
            engine.train_batch()
    assert plain.dataloader.state_dict() == ahead.dataloader.state_dict()
    assert plain.record is not None
    assert ahead.record is not None
    assert plain.record.lr == ahead.record.lr
    ahead.save_checkpoint(tmp_path)
    again = begin(1)
    again.load_checkpoint(tmp_path)
    for engine in (plain, again):
        engine.train_batch()
    assert torch.equal(plain.module.batches[-1], again.module.batches[-1])
