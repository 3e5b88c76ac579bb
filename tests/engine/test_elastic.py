"""Elastic jobs: any number of ranks trains with the same batch and the same losses, and goes on at another one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn
from torch.utils.data import TensorDataset

from zoo import sim
from zoo.config import ConfigError, load
from zoo.engine import RepeatingLoader, initialize
from zoo.engine.elastic import ElasticLoader

SAMPLES = 60


class Regression(nn.Module):
    """The mean loss of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.body(x) - y).square().mean()
        return loss


def data(count: int = SAMPLES) -> TensorDataset:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def document(batch: int | None, micro: int | None, stage: int = 0, **elastic: Any) -> dict[str, Any]:
    sizes = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}
    return {
        **{key: value for key, value in sizes.items() if value is not None}, "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}, "zero_optimization": {"stage": stage},
        "elasticity": {"enabled": True, **elastic},
    }  # fmt: skip


def trained(ranks: int, config: dict[str, Any], steps: int, folder: Path | None = None) -> list[float]:
    """The losses of these steps; with a folder from its newest checkpoint on, and saved at the end."""

    def fn(rank: int) -> list[float]:
        engine, *_ = initialize(config, Regression(), training_data=data())
        losses = [float(engine.train_batch()) for _ in range(steps)]
        assert engine.train_batch_size == engine.config.train_batch_size
        if folder is not None:
            engine.save_checkpoint(folder)
        return losses

    found: list[list[float]] = sim.run(ranks, fn)
    assert all(losses == found[0] for losses in found)
    return found[0]


@examples(times=0.2)
@given(st.integers(1, 13), st.integers(2, 8), st.integers(1, 5), st.sampled_from([0, 1, 2, 3]))
def test_any_number_of_ranks_gives_one_curve(batch: int, ranks: int, micro: int, stage: int) -> None:
    alone = trained(1, document(batch, 64), 3)
    assert trained(ranks, document(batch, micro, stage), 3) == pytest.approx(alone, rel=1e-9)


def test_a_job_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    expected = trained(1, document(7, 2), 12)
    found = []
    for ranks in (3, 2, 5, 1):  # over the end of an epoch, of 8 steps
        found += trained(ranks, document(7, 2, stage=2, resume_from=str(tmp_path)), 3, tmp_path)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("left", [None, ""])
def test_a_latest_that_is_lost_does_not_begin_the_job_anew(tmp_path: Path, left: str | None) -> None:
    given = document(7, 2, stage=2, resume_from=str(tmp_path))
    found = trained(2, given, 2, tmp_path)
    (tmp_path / "latest").unlink()
    if left is not None:
        (tmp_path / "latest").write_text(left)
    assert found + trained(2, given, 2) == pytest.approx(trained(1, document(7, 2), 4), rel=1e-9)


@examples(times=2)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 6), st.integers(0, 30))
def test_each_sample_of_an_epoch_counts_once(batch: int, ranks: int, micro: int, extra: int) -> None:
    dataset = TensorDataset(torch.arange(3 * batch + min(extra, batch - 1)))
    loaders = [ElasticLoader(dataset, batch, micro, rank=r, size=ranks, seed=5) for r in range(ranks)]
    seen: list[int] = []
    for turns in zip(*loaders, strict=True):
        for loader, (samples,) in zip(loaders, turns, strict=True):
            assert len(samples) == max(loader.handed, 1) <= micro
            seen += samples.tolist()[: loader.handed]
    assert len(seen) == len(set(seen)) == 3 * batch
    assert all(len(loader) == len(loaders[0]) for loader in loaders)


def test_a_folder_that_the_first_rank_cannot_read_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(folder: str) -> str:
        raise PermissionError(f"{folder} cannot be read")

    monkeypatch.setattr("zoo.checkpointing.has_checkpoints", unreadable)

    def fn(rank: int) -> None:
        with pytest.raises(Exception, match="cannot be read"):
            initialize(document(6, 4, resume_from=str(tmp_path)), Regression(), training_data=data())

    sim.run(2, fn)


def test_sizes_follow_from_the_section() -> None:
    config = load(
        {"elasticity": {"enabled": True, "micro_batch_sizes": [4, 6], "max_train_batch_size": 64}}, world_size=6
    )
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (48, 4)
    assert config.gradient_accumulation_steps == 2
    uneven = load(document(48, None, micro_batch_sizes=[4, 6]), world_size=5)  # 9 or 10 each, 6 at most at a time
    assert (uneven.train_micro_batch_size_per_gpu, uneven.gradient_accumulation_steps) == (5, 2)
    ignored = load(document(7, 2, ignore_non_elastic_batch_info=True, max_train_batch_size=100), world_size=1)
    assert ignored.train_batch_size > 7
    assert "elasticity" in ignored.source("train_batch_size")


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        ({**document(8, 2), "gradient_accumulation_steps": 4}, 1, "follows from the number of ranks"),
        (document(8, 2, min_gpus=2), 1, "1 data-parallel ranks; allowed are 2 to 10000"),
        (document(8, 2, max_gpus=3), 4, "4 data-parallel ranks; allowed are 1 to 3"),
        (document(8, 2, min_gpus=4, max_gpus=3), 4, "min_gpus is 4, more than max_gpus, 3"),
        (document(None, None, micro_batch_sizes=[]), 1, "micro_batch_sizes"),
        (document(None, None, micro_batch_sizes=[0]), 1, "give whole numbers from 1 on"),
        (document(8, None, micro_batch_sizes=[0, 2]), 1, "has 0; give whole numbers from 1 on"),
        (document(8, None, micro_batch_sizes=[4, -2]), 2, "has -2; give whole numbers from 1 on"),
        (document(None, None, micro_batch_sizes=[4], max_train_batch_size=2), 1, "larger than the largest batch"),
    ],
)
def test_sizes_that_cannot_be(config: dict[str, Any], ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(config, world_size=ranks)


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(ValueError, match="has 60 samples, fewer than a batch of 61"):
        initialize(document(61, 4), Regression(), training_data=data())
    engine, *_ = initialize(document(6, 4), Regression())
    with pytest.raises(ValueError, match="not of it: give initialize a data set"):
        engine(*data()[:2])
    with pytest.raises(ValueError, match="deals shares of 6"):
        engine.set_train_batch_size(12)
    engine, *_ = initialize(document(6, 4), Regression(), training_data=data())
    with pytest.raises(ValueError, match="no forward of the engine has computed"):
        engine.backward(engine.module(*data()[:2]))
    loss = engine(*next(iter(engine.dataloader)))
    with pytest.raises(ValueError, match=r"loss\.backward\(\)"):
        loss.backward()


def weights_ahead(
    ranks: int, config: dict[str, Any], steps: int, folder: Path, ahead: int, moved: bool
) -> list[float]:  # fmt: skip
    """The weights after these steps, from the folder's newest checkpoint on, of a program that fetches micro-batches
    ahead; ``moved``: and copies them, as to a GPU."""

    def fn(rank: int) -> list[float]:
        engine, *_ = initialize(config, Regression(), training_data=data())
        batches, fetched = iter(RepeatingLoader(engine.dataloader)), list[Any]()
        for _ in range(steps * engine.accumulation):
            while len(fetched) <= ahead:
                batch = next(batches)
                fetched.append([part.clone() for part in batch] if moved else batch)
            engine.backward(engine(*fetched.pop(0)))
            engine.step()
        engine.save_checkpoint(folder)
        return [float(x) for p in engine.module.parameters() for x in p.detach().flatten()]

    found: list[list[float]] = sim.run(ranks, fn)
    return found[0]


@pytest.mark.dear
@examples(times=0.2)
@given(
    st.integers(1, 13), st.lists(st.integers(1, 6), min_size=2, max_size=3), st.integers(1, 4), st.integers(0, 9),
    st.booleans(),
)  # fmt: skip
@example(7, [2, 3], 2, 1, False)
@example(7, [3, 2, 5], 2, 4, True)
@example(6, [2, 3], 3, 1, True)
def test_batches_that_are_fetched_ahead_count_as_they_are(
    batch: int, worlds: list[int], micro: int, ahead: int, moved: bool
) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as many:
        expected = weights_ahead(1, document(batch, 64), 3 * len(worlds), Path(one), 0, False)
        config = document(batch, micro, stage=2, resume_from=many)
        found = [weights_ahead(world, config, 3, Path(many), ahead, moved) for world in worlds]
    assert found[-1] == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_batches_that_are_left_out_are_refused() -> None:
    engine, *_ = initialize(document(6, 2), Regression(), training_data=data())
    batches = iter(engine.dataloader)
    left_out = next(batches)
    with pytest.raises(ValueError, match="micro-batch 0 of a step is given batch 1 of the 3"):
        engine(*next(batches))
    del left_out
    engine, *_ = initialize(document(6, 2), Regression(), training_data=data())
    batches = iter(engine.dataloader)
    engine.backward(engine(*next(batches)))
    engine.step()
    with pytest.raises(ValueError, match="micro-batch 1 of a step is given batch 0 of the 3"):  # it begins a step anew
        engine(*next(iter(engine.dataloader)))

    # Of 7 samples on 2 ranks rank 0 has 3, in micro-batches of 2 and 1; a copy is told by its size alone.
    def fn(rank: int) -> None:
        engine, *_ = initialize(document(7, 2), Regression(), training_data=data())
        batches = iter(engine.dataloader)
        if rank == 0:
            first, second = next(batches), next(batches)
            with pytest.raises(ValueError, match=r"has 1 samples, and batch 0 of this rank's share, .* has 2"):
                engine(*[part.clone() for part in second])
            engine(*first)

    sim.run(2, fn)


def test_a_batch_of_something_else_is_refused_where_a_step_has_one_micro_batch() -> None:
    engine, *_ = initialize(document(6, 8), Regression(), training_data=data())
    batch = next(iter(engine.dataloader))
    engine.backward(engine(*batch))
    engine.step()
    with pytest.raises(ValueError, match="is given one that the loader has not handed out"):
        engine(*[part.clone() for part in batch])


@pytest.mark.parametrize(("batch", "ranks"), [(2, 3), (7, 4), (6, 2)])
def test_samples_are_counted_as_often_as_they_count(batch: int, ranks: int) -> None:
    def fn(rank: int) -> tuple[int, int]:
        engine, *_ = initialize(document(batch, 2), Regression(), training_data=data())
        for _ in range(2):
            engine.train_batch()
        assert engine.record is not None
        return engine.record.samples, engine.record.total_samples

    assert sim.run(ranks, fn) == [(batch, 2 * batch)] * ranks


@pytest.mark.parametrize("again", [False, True])
def test_copies_of_batches_that_are_dropped_are_not_the_next_ones(again: bool) -> None:
    """A program that leaves out a batch with a bad loss, and copies its batches, as to a GPU."""
    engine, *_ = initialize(document(6, 8), Regression(), training_data=data())
    batches = iter(engine.dataloader)
    for number in range(3):
        batch = [part.clone() for part in next(batches)]
        loss = engine(*batch)
        if number == 1:
            engine.backward(engine(*batch) if again else loss)
            engine.zero_grad()
        if number:
            continue
        engine.backward(engine(*batch) if again else loss)
        engine.step()
    assert engine.dataloader.state_dict()["position"] == 18


def test_a_batch_may_be_used_twice_before_its_backward() -> None:
    engine, *_ = initialize(document(6, 2), Regression(), training_data=data())
    batches = iter(engine.dataloader)
    ahead = [next(batches) for _ in range(4)]
    for batch in ahead[:3]:
        engine(*batch)
        engine.backward(engine(*batch))
        engine.step()
    assert engine.global_steps == 1
    assert engine.dataloader.state_dict()["position"] == 6
