"""Features are choices of placements: what is split among whom, kept where, in which form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.shard.offload import Tier
from zoo.shard.placement.placements import Placements
from zoo.zero import ShardedModel, ZeroConfig


def placed(**given: Any) -> list[Placements]:
    def fn(rank: int) -> list[Placements]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for parameter in model[1].parameters():
            parameter.requires_grad_(False)
        config = ZeroConfig.model_validate({"param_persistence_threshold": 0, "reduce_bucket_size": 1, **given})
        sharded = ShardedModel(model, config=config)
        assert all(str(b.placements) in sharded.table() for b in sharded.buckets)
        return [b.placements for b in sharded.buckets]

    return sim.run(4, fn)[0]


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_says_what_is_split(stage: int) -> None:
    for one in placed(stage=stage):
        roles = (one.parameters, one.gradients, one.states)
        assert [role.is_split for role in roles] == [stage >= 3, stage >= 2, stage >= 1]
        for role in roles:
            size = role.split.size if role.split is not None else 1
            assert size * role.repeat.size == 4
            assert str(role).endswith(" device")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shard_groups_split_less_and_repeat_more(stage: int) -> None:
    for one in placed(stage=stage, mics_shard_size=2):
        assert one.states.split is not None
        assert (one.states.split.size, one.states.repeat.size) == (2, 2)
        assert str(one.states) == "1/2 x2 device"


def test_a_small_parameter_is_whole_at_stage_3_and_its_states_are_split() -> None:
    found = placed(stage=3, param_persistence_threshold=8, zero_hpz_partition_size=2)
    assert {one.parameters.is_split for one in found} == {False, True}
    for one in found:
        assert one.parameters.is_split is (one.secondary is not None)
        assert one.states.is_split
        assert one.gradients.is_split


def test_hpz_keeps_a_second_copy() -> None:
    for one in placed(stage=3, zero_hpz_partition_size=2):
        assert str(one.secondary).startswith("1/2")
    assert all(one.secondary is None for one in placed(stage=3, zero_hpz_partition_size=4))


def test_offloading_chooses_tiers() -> None:
    found = placed(stage=3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu", "ratio": 0.5})
    assert {one.parameters.tier for one in found} == {Tier.HOST}
    assert {one.states.tier for one in found} == {Tier.HOST, Tier.DEVICE}
    assert all(one.gradients.tier is one.states.tier for one in found)
    at_stage_1 = placed(stage=1, offload_optimizer={"device": "cpu"})
    assert {one.gradients.tier for one in at_stage_1} == {Tier.DEVICE}  # every rank needs all of them


def test_frozen_parameters_are_kept_packed() -> None:
    pytest.importorskip("zoo.kernels")
    found = placed(stage=3, zero_quantized_nontrainable_weights=True)
    assert sorted(one.parameters.packed for one in found) == [False, True]
    assert str(next(one for one in found if one.parameters.packed).parameters) == "1/4 device int8"
    assert not any(one.parameters.packed for one in placed(stage=2))


def test_updates_in_backward_keep_no_gradients() -> None:
    assert not any(one.keep_gradients for one in placed(stage=3, update_in_backward=True))
    assert torch.tensor([one.keep_gradients for one in placed(stage=3)]).all()


def test_the_second_stage_of_a_reduction_begins_before_the_next_one() -> None:
    """With replicas a gradient is summed within its shard group, and then over them while the next ones come."""
    trace = sim.Trace()

    def fn(rank: int) -> None:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        given = {"stage": 2, "mics_shard_size": 2, "reduce_bucket_size": 1}
        ShardedModel(model, config=ZeroConfig.model_validate(given), trains=True)
        model(torch.ones(1, 8)).sum().backward()

    sim.run(4, fn, trace=trace)
    for rank in range(4):
        ops = [e.op for e in trace.of_rank(rank) if "reduce" in e.op]
        assert [op.removesuffix("_tensor") for op in ops] == ["reduce_scatter", "all_reduce"] * 4
