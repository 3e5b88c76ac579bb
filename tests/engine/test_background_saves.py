"""Gloo processes whose checkpoints are written while they train: it disturbs nothing, and what is there is what was."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import run_ranks
from torch import nn

from zoo.checkpointing import BackgroundSaver, CheckpointError, load
from zoo.comm import Communicator
from zoo.engine import initialize
from zoo.layout import StateSlice, Stored


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)], nn.Linear(128, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - y).square().mean()


def on_nvme(path: str) -> dict[str, Any]:
    device = {"device": "nvme", "nvme_path": path}
    return {"offload_optimizer": device, "offload_param": device, "sub_group_size": 20000} if path else {}


def train(
    rank: int, folder: str, number: int, asynchronous: bool, nvme: str = ""
) -> tuple[list[float], list[float], bool]:
    """Losses with saves in between; those after the last checkpoint is loaded again; whether a save was under way."""
    config = {
        "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": number, **on_nvme(nvme)}, "checkpoint": {"asynchronous": asynchronous},
    }  # fmt: skip
    engine: Any = initialize(config, Loss())[0]
    dice = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 128, generator=dice) for _ in range(12)]
    losses, under_way = [], False
    for step, x in enumerate(batches):
        if step % 3 == 2 or step == 9:
            engine.save_checkpoint(folder, f"s{step}", {"step": step})
            saver = engine.checkpoints._saver
            under_way |= saver is not None and saver.pending
        losses.append(float(engine.train_batch(iter([(x, x.sum(1, keepdim=True))]))))
    _, client = engine.load_checkpoint(folder, "s9")
    assert client == {"step": 9}
    again = [float(engine.train_batch(iter([(x, x.sum(1, keepdim=True))]))) for x in batches[9:]]
    engine.destroy()
    return losses, again, under_way


def whole() -> StateSlice:
    return StateSlice("a", "parameter", 0, 4, (4,), torch.ones(4))


def broken() -> StateSlice:
    def load(start: int, length: int) -> torch.Tensor:
        raise RuntimeError("nobody has it")

    return replace(whole(), source=Stored(load, torch.float32))


def one_rank_fails(rank: int, folder: str) -> list[str]:
    saver, said = BackgroundSaver(Communicator()), []
    with pytest.raises(CheckpointError) as caught:
        saver.save(folder, "one", [broken()] if rank else [whole()])
    said.append(str(caught.value))
    # What only rank 0's counts of may be anything elsewhere.
    saver.save(folder, "two", [] if rank else [whole()], meta={"f": print} if rank else {"f": 1})
    saver.close()
    with load(folder, comm=Communicator()) as found:
        return [*said, found.tag, str(found.meta)]


def test_what_one_rank_cannot_copy_is_told_to_all(tmp_path: Path) -> None:
    for said, *rest in run_ranks(2, one_rank_fails, str(tmp_path)).values():
        assert "saving the checkpoint 'one'" in said
        assert "rank 1: RuntimeError: nobody has it" in said
        assert rest == ["two", "{'f': 1}"]


def some_ranks(rank: int, folder: str) -> float:
    """Groups that all ranks make afterwards have the same names on those that have not saved."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        saver = BackgroundSaver(Communicator(pair))
        saver.save(folder, "one", [] if rank else [whole()])
        saver.wait()
    everyone, found = dist.new_group([0, 1, 2], timeout=timedelta(seconds=20)), torch.ones(1)
    dist.all_reduce(found, group=everyone)
    return float(found)


@pytest.mark.slow
def test_some_ranks_of_a_job_save_in_the_background(tmp_path: Path) -> None:
    assert set(run_ranks(3, some_ranks, str(tmp_path)).values()) == {3.0}
    assert load(tmp_path).tag == "one"


def torn_down(rank: int, folder: str) -> bool:
    """A script that ends as torch's tutorials do, right after its last save."""
    numel = 4 << 20
    piece = StateSlice(f"p{rank}", "parameter", 0, numel, (numel,), torch.full((numel,), float(rank)))
    saver = BackgroundSaver(Communicator())
    saver.save(folder, "last", [piece])
    under_way = saver.pending
    dist.destroy_process_group()
    return under_way and not saver.pending


def test_a_save_is_over_before_the_process_groups_go(tmp_path: Path) -> None:
    assert all(run_ranks(2, torn_down, str(tmp_path)).values())
    with load(tmp_path) as found:
        assert [bool((found.tensor(f"p{rank}") == float(rank)).all()) for rank in range(2)] == [True, True]


@pytest.mark.dear
@pytest.mark.parametrize(("number", "nvme"), [pytest.param(1, False, marks=pytest.mark.slow), (3, False), (3, True)])
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, number: int, nvme: bool) -> None:
    expected = run_ranks(2, train, str(tmp_path / "a"), number, False, str(tmp_path) if nvme else "")
    found = run_ranks(2, train, str(tmp_path / "b"), number, True, str(tmp_path) if nvme else "")
    for rank, (losses, again, under_way) in found.items():
        assert losses == expected[rank][0]
        assert again == losses[9:] == expected[rank][1]
        assert under_way
        assert not expected[rank][2]
