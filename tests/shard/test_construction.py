"""A construction that fails in the midst of splitting a model: what is left of the model, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zero.blocks import Blocks, build, data
from torch import nn

from zoo import sim
from zoo.comm import RankFailedError
from zoo.shard import OffloadError, Precision, ShardedModel, ZeroConfig
from zoo.shard.buckets import Bucket
from zoo.shard.gradients import BucketGradients
from zoo.shard.guard import Guard
from zoo.shard.offload.scratch import NvmeFile
from zoo.shard.parameters import BucketParameters
from zoo.zero import ZeroOptimizer


def check_as_before(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, before[name]), name
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("param", [None, torch.bfloat16])
@pytest.mark.parametrize("part", [Guard, BucketGradients])
@pytest.mark.parametrize("stage", range(4))
def test_one_rank_alone_has_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, stage: int, part: Any, param: torch.dtype | None
) -> None:
    name, last = ("adopt", 5) if part is Guard else ("_attach", 3)  # of a parameter, or bucket, in the midst
    work, done = getattr(part, name), list[int]()

    def no_memory(self: Any, *given: Any) -> None:
        work(self, *given)
        done.append(1)
        if len(done) == last:
            raise MemoryError("none left")

    def fn(rank: int) -> None:
        model = Blocks()
        before = values(model)
        with pytest.raises(MemoryError, match=r"^none left$"):
            ZeroOptimizer(
                model, stage=stage, param_persistence_threshold=0, reduce_bucket_size=1,
                precision=Precision(param=param),
            )  # fmt: skip
        check_as_before(model, before)

    monkeypatch.setattr(part, name, no_memory)
    sim.run(1, fn)


def test_a_device_that_is_full_is_no_end_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = NvmeFile.write
    written: list[int] = []

    def full(self: NvmeFile, *given: Any, **named: Any) -> Any:
        written.append(1)
        if len(written) == 2:
            raise OffloadError("the device is full")
        return write(self, *given, **named)

    monkeypatch.setattr(NvmeFile, "write", full)

    def fn(rank: int) -> None:
        model = Blocks().double()
        before = values(model)
        offload = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
        with pytest.raises(OffloadError, match=r"^the device is full$"):
            build(3, model, offload_param=offload)
        check_as_before(model, before)

    sim.run(1, fn)


@pytest.mark.parametrize("stage", range(4))
def test_among_several_ranks_the_error_says_what_is_left(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    lay_out = BucketParameters._lay_out

    def no_memory(self: Any, source: Any) -> None:
        if self.bucket.index == 2 and self.bucket.shard_group.rank == 1:
            raise MemoryError("none left")
        lay_out(self, source)

    monkeypatch.setattr(BucketParameters, "_lay_out", no_memory)

    def fn(rank: int) -> None:
        model = Blocks().double()
        before = values(model)
        expected: Any = RankFailedError if rank == 0 else RuntimeError if stage == 3 else MemoryError
        with pytest.raises(expected, match="none left") as caught:
            build(stage, model)
        if stage == 3:
            assert "'first.weight', this rank has only a shard" in str(caught.value)
            assert "build it anew" in str(caught.value)
        else:
            check_as_before(model, before)

    sim.run(2, fn, group_timeout_s=5.0)


def test_what_is_frozen_for_inference_requires_gradients_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "new_shard", lambda self: 1 / 0)

    def fn(rank: int) -> None:
        model = Blocks().double()
        before = values(model)
        with pytest.raises(ZeroDivisionError):
            ShardedModel(model, config=ZeroConfig(stage=3, param_persistence_threshold=0), trains=False)
        check_as_before(model, before)
        model(data(rank)).sum().backward()

    sim.run(1, fn)
