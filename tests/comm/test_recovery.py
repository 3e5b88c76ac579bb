"""Going on after a failure: what the other ranks hear of it, and what happens to a rank that failed alone."""

from __future__ import annotations

import pytest
import torch

from zoo import sim
from zoo.comm import Communicator, RankFailedError, Recovery


def test_others_hear_the_first_failure_not_what_followed_from_it() -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        recovery = Recovery(comm)
        if rank == 1:
            recovery.failed(ValueError("the loss is not finite"))
            recovery.failed(RuntimeError("a backward ended with an exception"))
            return
        with pytest.raises(RankFailedError, match="rank 1 failed with ValueError: the loss is not finite"):
            comm.all_reduce(torch.ones(1)).wait()

    sim.run(2, fn, group_timeout_s=5.0)


def test_a_rank_that_fails_alone_is_told_who_did_not() -> None:
    """Ranks 0 and 2 fail; rank 1 goes on with something else, and never says that it failed."""

    def fn(rank: int) -> None:
        recovery = Recovery(Communicator())
        if rank == 1:
            return
        recovery.failed(ValueError("on purpose"))
        for _ in range(2):  # for good
            with pytest.raises(
                RankFailedError, match=rf"rank {rank} failed alone, without rank\(s\) 1: .*on purpose"
            ) as caught:
                recovery.settle()
            assert caught.value.ranks == (1,)

    sim.run(3, fn, group_timeout_s=5.0)


def test_after_a_failure_of_all_ranks_each_goes_on() -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        recovery = Recovery(comm)
        for number in range(2):
            recovery.failed(ValueError(f"number {number} on rank {rank}"))
            recovery.settle()
            assert not recovery.pending
            tensor = torch.ones(1)
            comm.all_reduce(tensor).wait()
            assert tensor.item() == 2.0

    sim.run(2, fn, group_timeout_s=5.0)


def test_messages_to_one_rank_are_no_other_place() -> None:
    """As a save sends them: rank 0 receives from all others, and each of these sends once."""

    def fn(rank: int) -> None:
        comm = Communicator()
        recovery = Recovery(comm)
        for other in range(1, 3):
            if rank == 0:
                comm.recv(torch.zeros(1), src=other).wait()
            elif rank == other:
                comm.send(torch.ones(1), dst=0).wait()
        recovery.failed(ValueError("on purpose"))
        recovery.settle()
        comm.all_reduce(torch.ones(1)).wait()

    sim.run(3, fn, group_timeout_s=5.0)


def test_without_other_processes_there_is_nothing_to_settle() -> None:
    recovery = Recovery(Communicator())
    recovery.failed(ValueError("on purpose"))
    recovery.settle()
