"""What differs between gloo and nccl, between transports, and what a timeout does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.versions import needs_groups_of_any_backend

from zoo import sim
from zoo.comm import Communicator
from zoo.comm.transport import NativeTransport, PairwiseTransport

SEEDS = range(5)


def crossing(rank: int) -> float:
    """Both ranks send, then receive, and wait in this order."""
    peer, got = 1 - rank, torch.zeros(1)
    works = [dist.isend(torch.full((1,), float(rank)), peer), dist.irecv(got, peer)]
    for work in works:
        assert work is not None
        work.wait()
    return got.item()


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_that_cross_deadlock_under_nccl_alone(seed: int) -> None:
    assert sim.run(2, crossing, seed=seed) == [1.0, 0.0]
    with pytest.raises(sim.DeadlockError) as caught:
        sim.run(2, crossing, seed=seed, semantics="nccl")
    text = str(caught.value)
    assert caught.value.ranks == (0, 1)
    for rank in range(2):
        assert f"rank {rank} waits in send of (1,) float32 to rank {1 - rank}" in text
        assert f"waiting for rank {1 - rank} to complete what it issued before on this group: send" in text


@needs_groups_of_any_backend
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("semantics", ["gloo", "nccl"])
def test_a_batch_is_one_operation(seed: int, semantics: str) -> None:
    def fn(rank: int) -> list[float]:
        others = [r for r in range(3) if r != rank]
        got = [torch.zeros(1) for _ in others]
        ops = [dist.P2POp(dist.isend, torch.full((1,), float(rank)), r) for r in others]
        ops += [dist.P2POp(dist.irecv, t, r) for t, r in zip(got, others, strict=True)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        total = torch.ones(1)
        dist.all_reduce(total)
        return [*(t.item() for t in got), total.item()]

    assert sim.run(3, fn, seed=seed, semantics=semantics) == [[1, 2, 3], [0, 2, 3], [0, 1, 3]]


@pytest.mark.parametrize("seed", SEEDS)
def test_an_operation_waits_for_the_earlier_ones_of_its_rank(seed: int) -> None:
    """Rank 0 sends behind a collective, which rank 1 makes after it has received: in one order that is a cycle."""

    def fn(rank: int, group: Any = None) -> None:
        if rank == 0:
            works = [dist.all_reduce(torch.ones(1), async_op=True), dist.isend(torch.ones(1), 1, group=group)]
        else:
            dist.recv(torch.ones(1), 0, group=group)
            works = [dist.all_reduce(torch.ones(1), async_op=True)]
        for work in works:
            assert work is not None
            work.wait()

    sim.run(2, fn, seed=seed)
    with pytest.raises(sim.DeadlockError, match=r"rank 0 to complete what it issued before on this group: all_reduce"):
        sim.run(2, fn, seed=seed, semantics="nccl")
    sim.run(2, lambda rank: fn(rank, dist.new_group([0, 1])), seed=seed, semantics="nccl")  # its own communicator


@pytest.mark.parametrize("seed", SEEDS)
def test_tags_count_under_gloo_alone(seed: int) -> None:
    def fn(rank: int) -> list[float]:
        tensors = [torch.full((1,), 10.0 + i) if rank == 0 else torch.zeros(1) for i in range(2)]
        for tag, tensor in enumerate(tensors):
            work = dist.isend(tensor, 1, tag=tag) if rank == 0 else dist.irecv(tensor, 0, tag=1 - tag)
            assert work is not None
            tensors[tag] = (work, tensor)  # type: ignore[call-overload]
        return [tensor.item() for work, tensor in tensors if work.wait()]  # type: ignore[misc]

    assert sim.run(2, fn, seed=seed)[1] == [11.0, 10.0]
    assert sim.run(2, fn, seed=seed, semantics="nccl")[1] == [10.0, 11.0]


def test_nccl_completes_in_the_order_of_issue() -> None:
    def fn(rank: int) -> bool:
        first, second = (dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2))
        second.wait()
        return bool(first.is_success())

    assert all(all(sim.run(3, fn, seed=seed, semantics="nccl")) for seed in range(20))
    assert not all(all(sim.run(3, fn, seed=seed)) for seed in range(20))


def test_a_receive_from_anyone_does_not_exist_under_nccl() -> None:
    with pytest.raises(sim.RankError, match="name the rank that sends"):
        sim.run(2, lambda rank: dist.recv(torch.ones(1)) if rank else dist.send(torch.ones(1), 1), semantics="nccl")


def test_a_crash_under_nccl() -> None:
    def fn(rank: int) -> None:
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
        for work in works:
            with pytest.raises(sim.PeerLostError):
                work.wait()

    for seed in SEEDS:
        sim.run(3, fn, seed=seed, semantics="nccl", faults=[sim.Crash(rank=1, at=0)])


def test_the_transport_of_a_run_is_the_one_of_its_communicators() -> None:
    def fn(rank: int) -> type:
        comm = Communicator()
        full = torch.zeros(2)
        comm.all_gather(full, torch.tensor([float(rank)])).wait()
        assert full.tolist() == [0.0, 1.0]
        assert type(comm.duplicate("other")._transport) is type(comm._transport)
        return type(comm._transport)

    assert sim.run(2, fn) == [NativeTransport] * 2
    assert sim.run(2, fn, transport="pairwise") == [PairwiseTransport] * 2
    with sim.defaults(transport="pairwise"):
        assert sim.run(2, fn) == [PairwiseTransport] * 2
        assert sim.run(2, fn, transport="native") == [NativeTransport] * 2
    assert sim.run(2, fn) == [NativeTransport] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"semantics": "mpi"}, "allowed are 'gloo' and 'nccl'"),
        ({"transport": "ring"}, "allowed are 'native', 'pairwise' and 'shared'"),
        ({"semantics": "nccl", "transport": "pairwise"}, 'give transport="native"'),
        ({"group_timeout_s": 0}, "above 0"),
    ],
)
def test_wrong_modes_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sim.run(1, lambda rank: None, **options)


@pytest.mark.parametrize("semantics", ["gloo", "nccl"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_wait_with_a_timeout_names_who_did_not_come(seed: int, semantics: str) -> None:
    def fn(rank: int) -> str:
        if rank == 2:
            return ""
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(sim.WaitTimeoutError) as caught:
            work.wait(timedelta(seconds=5))
        assert caught.value.ranks == ((2,) if rank == 0 else (0, 2))  # by then rank 0 has left
        with pytest.raises(sim.WaitTimeoutError) as again:
            work.wait()
        assert again.value is caught.value
        with pytest.raises(sim.WaitTimeoutError, match="after an operation on this group timed out"):
            dist.all_reduce(torch.ones(1))
        return str(caught.value)

    # Rank 0's deadline is not always the first: it is the one that waited first.
    try:
        found = sim.run(3, fn, seed=seed, semantics=semantics)
    except sim.RankError as error:
        assert "(0, 2)" in str(error) or "(1, 2)" in str(error)  # noqa: PT017
    else:
        assert "rank 0 waited 5 s (of simulated time) in all_reduce SUM of (1,) float32" in found[0]
        assert "waiting for rank 2" in found[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_time_passes_only_when_nothing_else_can_happen(seed: int) -> None:
    """However short the timeout: rank 1 comes in the end, by way of a hundred other operations."""

    def fn(rank: int) -> float:
        pair = dist.new_group([1, 2])
        tensor = torch.ones(1)
        if rank:
            for _ in range(100):
                dist.barrier(pair)
        dist.all_reduce(tensor, async_op=True).wait(timedelta(milliseconds=1))
        return tensor.item()

    assert sim.run(3, fn, seed=seed) == [3.0] * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_the_timeout_of_a_group(seed: int) -> None:
    def fn(rank: int) -> None:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        if rank == 0:
            with pytest.raises(sim.WaitTimeoutError, match="waited 2 s"):
                dist.all_reduce(torch.ones(1), group=group)
            with pytest.raises(sim.WaitTimeoutError, match="waited 7 s"):
                dist.recv(torch.ones(1), 1)

    sim.run(2, fn, seed=seed, group_timeout_s=7.0)
    with pytest.raises((sim.DeadlockError, sim.DivergenceError)):
        sim.run(2, fn, seed=seed)


@needs_groups_of_any_backend
@pytest.mark.parametrize("seed", SEEDS)
def test_a_monitored_barrier_names_who_never_came(seed: int) -> None:
    def fn(rank: int) -> None:
        dist.monitored_barrier()
        if rank in (1, 3):
            return
        with pytest.raises(sim.WaitTimeoutError, match=r"waiting for ranks 1, 3") as caught:
            dist.monitored_barrier(timeout=timedelta(seconds=1))
        assert caught.value.ranks == (1, 3)

    sim.run(4, fn, seed=seed)


def test_a_wait_in_the_store_can_time_out() -> None:
    def fn(rank: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            with pytest.raises(dist.DistStoreError, match=r"waited 3 s.*never"):
                store.wait(["never"], timedelta(seconds=3))

    sim.run(2, fn)


@needs_groups_of_any_backend
@pytest.mark.parametrize("semantics", ["gloo", "nccl"])
def test_groups_can_be_split(semantics: str) -> None:
    def fn(rank: int) -> float:
        half = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=half)
        rest = dist.split_group(split_ranks=[[0, 1, 2]])
        assert (rest is dist.GroupMember.NON_GROUP_MEMBER) == (rank == 3)
        if rank != 3:
            assert rest is not None
            dist.all_reduce(tensor, group=rest)
            dist.destroy_process_group(rest)
        return tensor.item()

    assert sim.run(4, fn, semantics=semantics) == [8.0, 8.0, 8.0, 4.0]
