"""Injected crashes and delays."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zoo import sim


def steps(rank: int) -> int:
    for _ in range(4):
        dist.all_reduce(torch.ones(1))
    return rank


@pytest.mark.parametrize("seed", range(4))
def test_a_crash_that_nobody_survives(seed):
    crash = sim.Crash(rank=1, at=2)
    trace = sim.Trace()
    with pytest.raises(sim.RankError, match=r"rank 1 crashed \(Crash\(rank=1, at=2\)\)") as caught:
        sim.run(3, steps, seed=seed, faults=[crash], trace=trace)
    assert caught.value.ranks[0] == 1
    assert isinstance(caught.value.__cause__, sim.PeerLostError)
    assert caught.value.__cause__.ranks == (1,)
    assert len(trace.of_rank(1)) == 2


@pytest.mark.parametrize("at", range(5))
def test_survivors_may_catch_and_return(at):
    heard = []

    def fn(rank: int):
        try:
            return steps(rank)
        except sim.PeerLostError as error:
            heard.append(str(error))
        pair = dist.new_group([0, 2], use_local_synchronization=True)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=pair)
        return tensor.item()

    crash = sim.Crash(rank=1, at=at)
    expected = [2.0, crash, 2.0] if at < 4 else [0, 1, 2]
    for seed in range(3):
        assert sim.run(3, fn, seed=seed, faults=[crash]) == expected
    assert len(heard) == (6 if at < 4 else 0)
    assert all(text.startswith("rank 1 died; rank") for text in heard)


def test_groups_without_the_dead_rank_go_on():
    def fn(rank: int):
        pair, other = dist.new_group([0, 1]), dist.new_group([2, 3])
        tensor = torch.ones(1)
        for _ in range(3):
            dist.all_reduce(tensor, group=pair if rank < 2 else other)
        return tensor.item()

    def guarded(rank: int):
        try:
            return fn(rank)
        except sim.PeerLostError:
            return "lost"

    crash = sim.Crash(rank=0, at=1)
    assert sim.run(4, guarded, faults=[crash]) == [crash, "lost", 8, 8]


def test_send_and_receive_with_the_dead():
    def fn(rank: int):
        heard = []
        for attempt in (
            lambda: dist.recv(torch.ones(1), 0),
            lambda: dist.send(torch.ones(1), 0),
            lambda: dist.recv(torch.ones(1)),
        ):
            try:
                attempt()
            except sim.PeerLostError:
                heard.append("lost")
        return heard

    crash = sim.Crash(rank=0, at=0)
    for seed in range(4):
        assert sim.run(2, fn, seed=seed, faults=[crash]) == [crash, ["lost"] * 3]


def test_the_dead_do_not_communicate_while_they_unwind():
    ends = []

    def fn(rank: int):
        try:
            dist.barrier()
        except Exception:
            ends.append("swallowed")
        finally:
            if rank == 0:
                ends.append(rank)
                dist.barrier()

    crash = sim.Crash(rank=0, at=0)
    assert sim.run(2, fn, faults=[crash]) == [crash, None]
    assert sorted(map(str, ends)) == ["0", "swallowed"]


def test_a_delay_changes_the_order_and_nothing_else():
    def fn(rank: int):
        first, second = torch.ones(1), torch.ones(1)
        works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
        works[1].wait()
        seen = first.item()
        works[0].wait()
        return seen, first.item(), second.item()

    for seed in range(5):
        slow = sim.run(2, fn, seed=seed, faults=[sim.Delay(rank=0, at=0, by=1000)])
        assert slow == [(1, 2, 2)] * 2
    assert any(sim.run(2, fn, seed=seed) != slow for seed in range(5))
