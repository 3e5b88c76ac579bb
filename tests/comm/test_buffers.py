"""Buffers that do not fit are refused on every rank before anything is sent, over every transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.processes import run_ranks

from zoo import sim
from zoo.comm import Communicator, RankFailedError, exchange

GAPS = torch.zeros(4, 2)
SAME = torch.zeros(4)
MODES: list[dict[str, Any]] = [{}, {"semantics": "nccl"}, {"transport": "pairwise"}, {"transport": "shared"}]
CASES: list[tuple[str, Callable[[Communicator], Any], str]] = [
    ("gather uneven", lambda c: c.all_gather(torch.zeros(5), torch.zeros(2)), "full with 5 elements and shard with 2"),
    ("gather short", lambda c: c.all_gather(torch.zeros(4), torch.zeros(1)), "on 2 ranks; full has 2 times"),
    ("gather dtypes", lambda c: c.all_gather(torch.zeros(4), torch.zeros(2).int()), "float32 on cpu and shard of"),
    ("gather gaps", lambda c: c.all_gather(GAPS[:, 0], torch.zeros(2)), "full of shape .4,. and strides .2,., which"),
    ("scatter uneven", lambda c: c.reduce_scatter(torch.zeros(5), torch.zeros(2)), "out with 2 on 2 ranks"),
    ("scatter long", lambda c: c.reduce_scatter(torch.zeros(4), torch.zeros(3)), "2 times as many as out: 6"),
    ("scatter scaled", lambda c: c.reduce_scatter(SAME.int(), torch.zeros(2).int(), scale=0.5), "scale=0.5 for"),
    ("to all in place", lambda c: c.all_to_all(SAME, SAME), "out and given that share memory"),
    (
        "to all over itself",
        lambda c: c.all_to_all_uneven(SAME[1:], SAME[:3], [1, 2], [2, 1]),
        "out and given that share memory",
    ),
    ("scatter gaps", lambda c: c.reduce_scatter(torch.zeros(8), GAPS[:, 0]), "out of shape .4,. and strides"),
    ("to all gaps", lambda c: c.all_to_all(GAPS[:, 0], torch.zeros(4)), "all_to_all got out of shape"),
    ("to all dtypes", lambda c: c.all_to_all(torch.zeros(4), torch.zeros(4).int()), "given of torch.int32 on cpu"),
    (
        "rows",
        lambda c: c.all_to_all_uneven(torch.zeros(2, 3), torch.zeros(2, 2), [1, 1], [1, 1]),
        r"out with rows of shape \(3,\) and given with rows of shape \(2,\)",
    ),
    ("reduce a list", lambda c: c.all_reduce([torch.zeros(2)]), "all_reduce got a list as tensor; it takes a tensor"),
    ("broadcast a number", lambda c: c.broadcast(1.0), "broadcast got a float as tensor"),
    ("a tuple", lambda c: c.batch([(torch.zeros(2), 1)]), "batch got a tuple as a message; it takes Send and Recv"),
    ("ranks", lambda c: Communicator([0, 1]), r"got \[0, 1\] as its group; it takes a process group"),
    ("reduce gaps", lambda c: c.all_reduce(GAPS[:, 0]), "not contiguous: give .contiguous"),
    ("broadcast gaps", lambda c: c.broadcast(GAPS[:, 0]), "not contiguous: give .contiguous"),
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_buffers_that_do_not_fit_are_refused_and_all_goes_on(mode: dict[str, Any]) -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        comm.share_memory()
        for _, call, words in CASES:
            with pytest.raises(ValueError, match=words):
                call(comm)
            full = torch.empty(2)
            comm.all_gather(full, torch.tensor([float(rank)])).wait()
            assert full.tolist() == [0.0, 1.0]
        assert not GAPS.any()

    sim.run(2, fn, **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_buffers_of_more_dims_are_taken_row_after_row(mode: dict[str, Any]) -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        comm.share_memory()
        full, out = torch.zeros(2, 1, 3), torch.zeros(1, 3)
        comm.all_gather(full, torch.full((3, 1), float(rank))).wait()
        assert full.tolist() == [[[0.0] * 3], [[1.0] * 3]]
        comm.reduce_scatter(full, out).wait()
        assert out.tolist() == [[2.0 * rank] * 3]
        scalars = torch.zeros(2)
        comm.all_gather(scalars, torch.tensor(1.0 + rank)).wait()
        assert scalars.tolist() == [1.0, 2.0]

    sim.run(2, fn, **mode)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_tensors_that_need_gradients_are_memory_like_others(mode: dict[str, Any], size: int) -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        comm.share_memory()
        own, full, out = (torch.full((n,), rank + 1.0, requires_grad=True) for n in (2, 2 * size, 2))
        plain = torch.zeros(2 * size)
        comm.all_gather(plain, own).wait()
        assert plain.tolist() == [r + 1.0 for r in range(size) for _ in range(2)]
        assert not plain.requires_grad
        comm.reduce_scatter(full, out, scale=0.5).wait()
        assert out.tolist() == [size * (size + 1) / 4] * 2
        assert out.is_leaf
        comm.all_gather(full, own).wait()
        assert full.tolist() == plain.tolist()
        assert full.is_leaf
        comm.all_reduce(own).wait()
        assert own.tolist() == [size * (size + 1) / 2] * 2
        assert own.is_leaf

    sim.run(size, fn, **mode)


def test_an_exchange_of_one_tensor_is_refused_and_of_none_is_nothing() -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        with pytest.raises(ValueError, match=r"exchange got one tensor of shape \(2, 2, 2\); it takes several"):
            exchange(torch.zeros(2, 2, 2), comm, split_dim=0, join_dim=1)
        assert exchange((), comm, split_dim=0, join_dim=1) == ()

    sim.run(2, fn)


def test_an_object_that_cannot_be_pickled_is_told_to_all_ranks() -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        bad = (lambda: 0) if rank == 1 else None
        for call in (comm.all_gather_object, lambda value: comm.broadcast_object(value, 1)):
            with pytest.raises(Exception, match=r"(?i)pickle") as found:
                call(bad)
            assert rank == 1 or (isinstance(found.value, RankFailedError) and found.value.ranks == (1,))
        assert comm.all_gather_object(rank) == [0, 1, 2]

    sim.run(3, fn)


def test_on_nccl_the_check_sends_from_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl has no collectives of CPU tensors; here devices are what is asked for."""
    seen: list[str] = []

    def fn(rank: int) -> None:
        comm = Communicator(check=True)
        monkeypatch.setattr("zoo.comm.communicator.verify", lambda group, what, device: seen.append(device.type))
        monkeypatch.setattr(Communicator, "device", torch.device("meta"))
        comm.agree("a", "b")
        comm._agree("barrier", torch.empty(0, device=comm.device))

    sim.run(2, fn)
    assert seen == ["meta"] * 4


def drop(rank: int, world: int) -> bool:
    comm = Communicator()
    for number in range(20):
        for n in (0, 3, 50_000):
            comm.all_gather(torch.zeros(world * n), torch.ones(n))  # nobody waits
            comm.reduce_scatter(torch.zeros(world * n), torch.ones(n))
            comm.send(torch.full((n,), float(number)), (rank + 1) % world)
            arrives = torch.zeros(n)
            comm.recv(arrives, (rank - 1) % world).wait()
            assert bool((arrives == number).all())
        full = torch.empty(world)
        comm.all_gather(full, torch.tensor([float(rank)])).wait()
        assert full.tolist() == [float(r) for r in range(world)]
    torch.distributed.barrier()
    return True


@pytest.mark.slow
def test_what_nobody_waits_for_upsets_nothing_on_gloo() -> None:
    assert run_ranks(2, drop, 2) == {0: True, 1: True}


def many(rank: int, world: int) -> bool:
    comm = Communicator()
    comm.share_memory()
    for _ in range(2):
        handles = [comm.all_gather(torch.zeros(world), torch.ones(1)) for _ in range(700)]
        time.sleep(0.3 * rank)
        for handle in handles:
            handle.wait()
    torch.distributed.barrier()
    return True


@pytest.mark.dear
def test_a_rank_that_reads_slowly_is_waited_for() -> None:
    """No rank has more than 700 in flight, but those of two rounds are more than can be told apart."""
    assert run_ranks(2, many, 2) == {0: True, 1: True}


def differ(rank: int, world: int) -> str:
    comm = Communicator(torch.distributed.new_group(timeout=timedelta(seconds=1)))
    message = torch.ones(2 + 2 * rank)
    try:
        (comm.send(message, 1) if rank == 0 else comm.recv(message, 0)).wait()
    except RankFailedError as error:
        return str(error)
    return f"{message.tolist()}"


def test_a_message_never_fills_a_buffer_of_another_size() -> None:
    found = run_ranks(2, differ, 2)
    assert all(
        f"rank {1 - rank} does not answer" in text and 'comm": {"check": true}' in text for rank, text in found.items()
    ), found


def alone(rank: int, world: int) -> list[str]:
    """Rank 1 waits for rank 0 in collectives of torch, which calls none."""
    comm = Communicator(torch.distributed.new_group(timeout=timedelta(seconds=1)))
    texts = []
    calls = [lambda: comm.broadcast(torch.ones(2), 0).wait(), lambda: comm.agree("saving", "one")]
    for call in calls if rank else ():
        try:
            call()
        except RankFailedError as error:
            texts.append(str(error))
    torch.distributed.barrier()
    return texts


def test_a_collective_that_the_others_do_not_call_names_the_option() -> None:
    found = run_ranks(2, alone, 2)
    assert found[0] == []
    assert len(found[1]) == 2
    for text in found[1]:
        assert text.startswith("a rank of this collective does not answer: RuntimeError: ")
        assert '"check": true' in text


def rare(rank: int, world: int) -> bool:
    """gloo has no name for these dtypes."""
    shared = Communicator().duplicate("shared")
    shared.share_memory()
    for comm in (Communicator(), shared):
        for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn):
            own = torch.tensor([rank, 2.0]).to(dtype)
            full, swapped = torch.zeros(2 * world).to(dtype), torch.zeros(2).to(dtype)
            comm.all_gather(full, own).wait()
            assert full.float().tolist() == [0.0, 2.0, 1.0, 2.0]
            comm.all_to_all(swapped, own).wait()
            assert swapped.float().tolist() == [[0.0, 1.0], [2.0, 2.0]][rank]
            rows = torch.zeros(rank).to(dtype)  # of rank 0 to rank 1
            comm.all_to_all_uneven(rows, own[rank:1], [rank, 0], [0, 1 - rank]).wait()
            assert rows.float().tolist() == [0.0] * rank
            seen = own.clone()
            comm.broadcast(seen, 1).wait()
            assert seen.float().tolist() == [1.0, 2.0]
            comm.send(own, 1).wait() if rank == 0 else comm.recv(seen, 0).wait()
            assert seen.float().tolist() == [float(not rank), 2.0]
        total = torch.zeros(1, dtype=torch.int16)
        comm.reduce_scatter(torch.tensor([1, 2], dtype=torch.int16), total).wait()
        assert total.item() == 2 * (1 + rank)
    shared.all_reduce(total).wait()  # rank by rank, in memory
    assert total.item() == 6
    with pytest.raises(ValueError, match=r"all_reduce got torch.int16, of which backends make no sums"):
        Communicator().all_reduce(total)
    torch.distributed.barrier()
    return True


def test_dtypes_that_backends_do_not_know_travel_as_bytes() -> None:
    assert run_ranks(2, rare, 2) == {0: True, 1: True}
