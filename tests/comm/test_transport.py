"""Handles, and the pairwise transport."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoo import sim
from zoo.comm import CommsLog, Communicator
from zoo.comm.handles import Pending
from zoo.comm.transport import PairwiseTransport


class Work:
    """Counts how often it is waited for, and fails if told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.num_waits = error, 0

    def wait(self) -> None:
        self.num_waits += 1
        if self.error is not None:
            raise self.error


@given(fails=st.lists(st.booleans(), min_size=1, max_size=4), timed=st.booleans())
def test_a_failure_is_raised_by_every_wait(fails: list[bool], timed: bool) -> None:
    works = [Work(RuntimeError(f"peer {i} is gone")) if fail else Work() for i, fail in enumerate(fails)]
    ran: list[int] = []
    handle = Pending(list(works), lambda: ran.append(1))
    row = CommsLog().issued("all_gather", 8, 2)
    if timed:
        handle.timed(row)
    for _ in range(3):
        if any(fails):
            with pytest.raises(RuntimeError) as caught:
                handle.wait()
            assert caught.value is works[fails.index(True)].error
        else:
            handle.wait()
    assert all(work.num_waits <= 1 for work in works)
    assert len(ran) == (not any(fails))
    assert (row.time_s > 0) == (timed and not any(fails))


def test_a_failure_after_the_messages_is_raised_by_every_wait() -> None:
    def fail() -> None:
        raise ValueError("no room")

    handle = Pending([Work()], fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no room"):
            handle.wait()


def test_a_lost_peer_is_told_by_every_wait() -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        handles = [comm.all_gather(torch.empty(3), torch.ones(1)), comm.all_reduce(torch.ones(1))]
        for handle in [*handles, *handles]:
            with pytest.raises(sim.PeerLostError, match="rank 2 died"):
                handle.wait()

    sim.run(3, fn, faults=[sim.Crash(rank=2, at=0)])


DIFFERENT = {
    "kind": lambda comm, flip: [
        lambda: comm.all_gather(torch.zeros(2), torch.ones(1), "x"),
        lambda: comm.reduce_scatter(torch.ones(2), torch.zeros(1), 1.0, "x"),
    ][::flip],
    "label": lambda comm, flip: [
        lambda: comm.all_gather(torch.zeros(2), torch.ones(1), "a"),
        lambda: comm.all_gather(torch.zeros(2), torch.ones(1), "b"),
    ][::flip],
    "dtype": lambda comm, flip: [
        lambda: comm.all_gather(torch.zeros(2), torch.ones(1)),
        lambda: comm.all_gather(torch.zeros(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)),
    ][::flip],
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_collectives_in_different_order_do_not_meet(difference: str) -> None:
    """Their messages have one size: with one tag for all of them they would be swapped without a word."""

    def fn(rank: int) -> None:
        for handle in [call() for call in DIFFERENT[difference](PairwiseTransport(None), 1 if rank else -1)]:
            handle.wait()

    with pytest.raises(sim.DeadlockError):
        sim.run(2, fn)


def test_the_messages_of_two_collectives_keep_apart_from_a_users() -> None:
    def fn(rank: int, before: int) -> None:
        import torch.distributed as dist

        comm, peer, of = PairwiseTransport(None), 1 - rank, torch.empty(0)
        tags = {comm._tag("all_gather", of, "") for _ in range(before)}
        assert len(tags) == min(before, 65_536)
        assert all(1 << 30 <= tag < 1 << 31 for tag in tags)
        first, second = torch.zeros(2), torch.zeros(2)
        mine, theirs = torch.full((1,), 7.0), torch.zeros(1)
        works = [dist.isend(mine, peer), dist.irecv(theirs, peer)]
        handles = [comm.all_gather(f, torch.tensor([r])) for f, r in ((first, rank + 1.0), (second, rank + 11.0))]
        for handle in (*handles[::-1], *works):
            handle.wait()
        assert (first.tolist(), second.tolist(), theirs.item()) == ([1, 2], [11, 12], 7)

    for seed in range(4):
        before = 3 if seed else 70_000  # more than there are numbers
        sim.run(2, lambda rank, before=before: fn(rank, before), seed=seed)


def test_communicators_of_one_group_number_their_collectives_together() -> None:
    def fn(rank: int) -> None:
        one, other = PairwiseTransport(None), PairwiseTransport(None)
        first, second = torch.zeros(2), torch.zeros(2)
        handles = [one.all_gather(first, torch.ones(1)), other.all_gather(second, torch.full((1,), 2.0))]
        for handle in handles[:: 1 if rank else -1]:
            handle.wait()
        assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])

    sim.run(2, fn)


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_added_in_rank_order(seed: int) -> None:
    """2²⁴ + 1 + 1 - 2²⁴ in fp32 is 0, 1 or 2 by the order of the additions."""
    values = [2.0**24, 1.0, 1.0, -(2.0**24)]
    for order in ([0, 1, 2, 3], [1, 2, 0, 3], [0, 3, 1, 2], [3, 1, 0, 2]):
        expected = torch.zeros(())
        for position, r in enumerate(order):
            value = torch.tensor(values[r])
            expected = value if position == 0 else expected + value

        def fn(rank: int, order: list[int] = order) -> float:
            full, out = torch.full((4,), values[order[rank]]), torch.empty(1)
            PairwiseTransport(None).reduce_scatter(full, out, 1.0).wait()
            return out.item()

        assert sim.run(4, fn, seed=seed) == [expected.item()] * 4
