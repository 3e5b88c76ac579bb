"""A model that is split over ranks without an optimizer: forward alone, the verbs, and what it gives back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.zero import (
    GatheredParameters,
    PartitionedAccessError,
    ShardedModel,
    ZeroConfig,
    ZeroOptimizer,
    safe_get_full_fp32_param,
)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)], nn.Linear(8, 3))


def shard(model: nn.Module, trains: bool = False, **options: Any) -> ShardedModel:
    given = {"stage": 3, "param_persistence_threshold": 0, "reduce_bucket_size": 1, **options}
    return ShardedModel(model, config=ZeroConfig.model_validate(given), trains=trains)


@pytest.mark.matrix
@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("grads", [True, False])
def test_forward_alone_from_every_tier(tier: str, world: int, grads: bool, tmp_path: Path) -> None:
    x = torch.randn(5, 8)
    plain = make()
    expected, others = plain(x), plain(x + 1)

    def fn(rank: int) -> None:
        model = make()
        where: dict[str, Any] = {"device": tier, "max_in_cpu": 0} if tier != "device" else {}
        if tier == "nvme":
            where["nvme_path"] = tmp_path
        sharded = shard(model, **({"offload_param": where} if where else {}))
        with torch.set_grad_enabled(grads):
            for _ in range(3):  # from the second pass on in a known order
                assert torch.equal(model(x), expected)
            assert torch.equal(model(x + 1), others)
        assert not any(b.active or b.leases for b in sharded.buckets)
        assert all(b.gradients is None for b in sharded.buckets)
        if world > 1:
            assert not any(b.parameters.live for b in sharded.buckets)
        with pytest.raises(PartitionedAccessError):
            model[0][0].weight.sum()
        sharded.close()
        assert model[0][0].weight.requires_grad
        assert torch.equal(model(x), expected)

    sim.run(world, fn)


def test_verbs_and_the_state_that_can_be_printed() -> None:
    def fn(rank: int) -> None:
        model = make()
        sharded = shard(model)
        first = sharded.buckets[:1]
        assert "unsharded" not in sharded.table()
        sharded.unshard(first)
        assert sharded.table().splitlines()[1].split()[2] == "unsharding"
        sharded.wait(first)
        assert sharded.table().splitlines()[1].split()[2] == "unsharded"
        assert torch.equal(model[0][0].weight, make()[0][0].weight)
        sharded.reshard(first)
        assert sharded.table().splitlines()[1].split()[2] == "sharded"
        assert dict(sharded.whole_parameters()).keys() == dict(make().named_parameters()).keys()

    sim.run(2, fn)


def test_the_table_says_what_gradients_are() -> None:
    def fn(rank: int) -> None:
        model = make()
        sharded = shard(model, trains=True)

        def column() -> set[str]:
            return {row.split()[3] for row in sharded.table().splitlines()[1:]}

        assert column() == {"idle"}
        with sharded.no_sync():
            model(torch.ones(1, 8)).sum().backward()
        assert column() == {"accumulating"}
        sharded.reduce()
        assert column() == {"reduced"}
        assert {row.split()[3] for row in shard(make()).table().splitlines()[1:]} == {"none"}

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
def test_a_model_that_is_given_back_runs_on_one_rank_alone(stage: int) -> None:
    """Nothing of ours runs with it any more, nor does it keep anything of ours alive."""
    x = torch.ones(2, 8)

    def fn(rank: int) -> None:
        model = make()
        sharded = shard(model, trains=True, stage=stage)
        model(x).sum().backward()
        sharded.close()
        log, gone = sharded.comm.log, weakref.ref(sharded)
        num_issued = log.num_issued
        del sharded
        gc.collect()
        assert gone() is None
        if rank == 0:
            for _ in range(2):
                model.zero_grad()
                model(x).sum().backward()
            assert model[0][0].weight.grad is not None
        assert log.num_issued == num_issued

    sim.run(2, fn)


def test_values_can_be_written_without_an_optimizer() -> None:
    def fn(rank: int) -> None:
        model = make()
        sharded = shard(model)
        model[4].bias.data = torch.full((3,), 2.0)
        with GatheredParameters(model[4].weight, modifier_rank=1), torch.no_grad():
            model[4].weight.fill_(float(rank))
        found = {name: value.clone() for name, value in sharded.whole_parameters()}
        assert found["4.bias"].tolist() == [2.0] * 3
        assert bool((found["4.weight"] == 1).all())
        with pytest.raises(ValueError, match="without an optimizer"):
            safe_get_full_fp32_param(model[4].weight)

    sim.run(2, fn)


def test_gradients_are_reduced_without_an_optimizer() -> None:
    def fn(rank: int) -> None:
        model = make()
        sharded = shard(model, trains=True, stage=2)
        with sharded.no_sync():
            model(torch.full((1, 8), float(rank))).sum().backward()
        sharded.reduce()
        plain = make()
        for r in range(2):
            (plain(torch.full((1, 8), float(r))).sum() / 2).backward()
        for bucket in sharded.buckets:
            assert bucket.gradients is not None
            low, _ = bucket.own_range
            mine = bucket.gradients.reduced_chunk(rank)
            for piece in bucket.layout.slices(low, low + mine.numel()):
                whole = plain.get_parameter(piece.name).grad
                assert whole is not None
                torch.testing.assert_close(
                    mine[piece.offset : piece.offset + piece.length],
                    whole.flatten()[piece.start : piece.start + piece.length],
                )

    sim.run(2, fn)


def test_an_optimizer_takes_a_closed_model() -> None:
    model = make()
    shard(model).close()
    optimizer = ZeroOptimizer(model, stage=3, lr=0.1)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_values_can_be_written_before_there_is_an_optimizer(stage: int, tier: str, tmp_path: Path) -> None:
    if tier == "nvme" and stage < 3:
        pytest.skip("parameters are offloaded at stage 3")
    options = {"offload_param": {"device": tier, "nvme_path": tmp_path, "max_in_cpu": 0}} if tier == "nvme" else {}

    def fn(rank: int) -> None:
        model = make()
        sharded = shard(model, trains=True, stage=stage, **options)
        with GatheredParameters(model[4].weight, modifier_rank=1), torch.no_grad():
            model[4].weight.fill_(float(rank))
        assert not any(bucket.active for bucket in sharded.buckets)
        assert not any(bucket.partitioned and bucket.parameters.live for bucket in sharded.buckets)
        model(torch.ones(2, 8)).sum().backward()
        sharded.close()
        assert bool((model[4].weight == 1).all())

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_write_that_is_refused_holds_nothing_and_changes_nothing(stage: int) -> None:
    def fn(rank: int) -> None:
        model = make()
        before = model[4].weight.detach().clone()
        optimizer = ZeroOptimizer(model, stage=stage, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1)
        sharded = optimizer.sharded
        del optimizer
        gc.collect()
        inside = GatheredParameters(model[4].weight, modifier_rank=1)
        with pytest.raises(ValueError, match="does not exist any more"), inside, torch.no_grad():
            model[4].weight.fill_(float(rank))
        assert not any(bucket.active for bucket in sharded.buckets)
        found = {name: value.clone() for name, value in sharded.whole_parameters()}
        assert torch.equal(found["4.weight"], before)

    sim.run(2, fn)
