"""Residency policies written outside of zoo: what stays whole is theirs to say, and the bits are the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.plan import Kind
from zoo.shard.parameters import Presence
from zoo.shard.runtime.planning import plan_of
from zoo.shard.runtime.residency import Budgets, ResidencyPolicy
from zoo.zero import ZeroOptimizer

UNITS = 5


class KeepsEverything(ResidencyPolicy):
    def rest(self, bucket: Any, now: Any, *, backward: bool) -> Collection[Any]:
        return ()


class KeepsNothing(ResidencyPolicy):
    pass


class PinsTheFirst(ResidencyPolicy):
    """The first K stay; one more is gathered ahead, and the others go as soon as nobody uses them."""

    prefetches = True

    def __init__(self, num_pinned: int) -> None:
        self._num_pinned = num_pinned

    def ahead(self, order: Sequence[Any], position: int) -> Iterable[Any]:
        return order[position : position + 1]

    def rest(self, bucket: Any, now: Any, *, backward: bool) -> Collection[Any]:
        return () if bucket.index < self._num_pinned else (bucket,)


class KeepsTheNewest(ResidencyPolicy):
    """Room for two, whatever they are for: who needs it takes the place of the one that has rested longest."""

    makes_room = True

    def room(self, bucket: Any, now: Any, soon: Collection[Any] | None) -> Iterable[Any] | None:
        return list(now.resting)[: max(len(now.resting) - 1, 0)]

    def rest(self, bucket: Any, now: Any, *, backward: bool) -> Collection[Any]:
        return list(now.resting)[:-1]


def trained(rank: int, policy: ResidencyPolicy | None) -> tuple[list[torch.Tensor], list[int], int]:
    """Parameters after three steps of two backwards; whole buckets after the last forward and backward; gathers."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(UNITS)])
    optimizer = ZeroOptimizer(
        model, stage=3, optimizer=torch.optim.AdamW, lr=0.1, units=[nn.Linear], reduce_bucket_size=1,
        param_persistence_threshold=0, max_live_parameters=0,
    )  # fmt: skip
    if policy is not None:
        optimizer.sharded.use_residency(policy)
    whole: list[int] = []
    for step in range(3):
        for micro in range(2):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + 2 * micro + rank))
            with optimizer.sharded.record() as actions:
                loss = model(x).square().mean()
                forward = sum(b.parameters.presence is not Presence.SHARDED for b in optimizer.buckets)
                loss.backward()
            whole = [forward, sum(b.parameters.presence is not Presence.SHARDED for b in optimizer.buckets)]
            if step and not micro:  # it begins with nothing whole, in a known order
                planned = plan_of(optimizer.runtime).actions
                assert [(a.kind, a.bucket) for a in actions] == [(a.kind, a.bucket) for a in planned]
        optimizer.step()
        optimizer.zero_grad()
        assert all(b.parameters.presence is Presence.SHARDED for b in optimizer.buckets)  # what is stale goes
    gathers = len(actions.of_kind(Kind.UNSHARD, Kind.PREFETCH))
    return [p.detach().clone() for _, p in optimizer.whole_parameters()], whole, gathers


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("policy", "whole", "gathers"),
    [
        (KeepsEverything(), [UNITS, UNITS], 0),  # the first backward has left all of it there
        (KeepsNothing(), [0, 0], 2 * UNITS),
        (PinsTheFirst(2), [2, 2], 2 * (UNITS - 2)),
        (KeepsTheNewest(), [2, 2], None),
    ],
)
def test_a_policy_of_ones_own(policy: ResidencyPolicy, whole: list[int], gathers: int | None) -> None:
    plain = sim.run(2, lambda rank: trained(rank, None))
    mine = sim.run(2, lambda rank: trained(rank, policy))
    for (expected, _, _), (found, kept, moved) in zip(plain, mine, strict=True):
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b)
        assert kept == whole
        assert gathers is None or moved == gathers


def test_forward_alone_keeps_what_is_pinned_over_passes() -> None:
    def fn(rank: int) -> None:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(UNITS)])
        optimizer = ZeroOptimizer(
            model, stage=3, lr=0.1, units=[nn.Linear], reduce_bucket_size=1, param_persistence_threshold=0
        )
        optimizer.sharded.use_residency(PinsTheFirst(3))
        with torch.no_grad():
            model(torch.ones(1, 4))
            with optimizer.sharded.record() as actions:
                model(torch.ones(1, 4))
        assert sorted(a.bucket for a in actions.of_kind(Kind.UNSHARD, Kind.PREFETCH)) == [3, 4]

    sim.run(2, fn)


def test_ranks_with_other_policies_are_told() -> None:
    def fn(rank: int) -> None:
        model = nn.Linear(4, 4)
        optimizer = ZeroOptimizer(model, stage=3, lr=0.1, param_persistence_threshold=0)
        with pytest.raises(ValueError, match="KeepsEverything"):
            optimizer.sharded.use_residency(KeepsEverything() if rank else KeepsNothing())

    sim.run(2, fn)


def test_ranks_with_other_numbers_in_a_policy_are_told() -> None:
    """They would gather other buckets, and wait for each other."""

    def fn(rank: int) -> None:
        model = nn.Linear(4, 4)
        optimizer = ZeroOptimizer(model, stage=3, lr=0.1, param_persistence_threshold=0)
        with pytest.raises(CollectiveMismatchError, match="residency policy"):
            optimizer.sharded.use_residency(Budgets(prefetch_bytes=0, keep_bytes=100 * rank))
        optimizer.sharded.use_residency(Budgets(prefetch_bytes=0, keep_bytes=100))

    sim.run(2, fn)
