"""Shared memory between the ranks of one host: bitwise what messages give, in any order, also when ranks are lost."""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import run_ranks, start
from tests.profiles import examples

from zoo import sim
from zoo.comm import Communicator, RankFailedError, posts, segments
from zoo.comm.posts import Inbox, PipePost, open_pipe
from zoo.comm.segments import OwnSegment, PeerSegment
from zoo.comm.shared import SharedTransport, make_shared
from zoo.comm.transport import PairwiseTransport

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32]
OPS = st.tuples(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce sum", "all_reduce max", "all_reduce min"]),
    st.integers(0, 40),  # elements of a chunk
    st.sampled_from(DTYPES),
    st.booleans(),  # in place
    st.sampled_from([1.0, 0.5]),
    st.booleans(),  # gradients lie in the shared memory
)


def data(rank: int, number: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(n, generator=torch.Generator().manual_seed(1000 * number + rank)) * 100
    return made.to(dtype)


def issue(transport: Any, rank: int, world: int, number: int, op: tuple[Any, ...]) -> tuple[Any, torch.Tensor]:
    kind, n, dtype, inplace, scale, roomy = op
    mine = slice(rank * n, (rank + 1) * n)
    if kind == "all_gather":
        full, shard = torch.zeros(world * n, dtype=dtype), data(rank, number, n, dtype)
        if inplace:
            full[mine] = shard
            shard = full[mine]
        return transport.all_gather(full, shard, "x"), full
    full = data(rank, number, world * n, dtype)
    if kind.startswith("all_reduce"):
        return transport.all_reduce(full, kind.removeprefix("all_reduce ")), full
    room = transport.room(full.nbytes) if roomy and rank != number % world else None  # of some ranks only
    if room is not None:
        full = room.view(dtype).copy_(full)
    out = full[mine] if inplace else torch.zeros(n, dtype=dtype)
    return transport.reduce_scatter(full, out, scale if dtype.is_floating_point else 1.0, "x"), out


def play(transport: Any, rank: int, world: int, ops: list[Any], order: list[int], lost: set[int]) -> list[torch.Tensor]:
    """Issue them all, drop some handles, wait for the others in this order."""
    found = [issue(transport, rank, world, i, op) for i, op in enumerate(ops)]
    handles = {i: handle for i, (handle, _) in enumerate(found) if i not in lost}
    results = [result for _, result in found]
    found.clear()
    for i in order:
        if i in handles:
            handles.pop(i).wait()
    return [result.clone() for i, result in enumerate(results) if i not in lost]


@examples(times=3)
@given(
    world=st.integers(2, 4), ops=st.lists(OPS, min_size=1, max_size=6), seed=st.integers(0, 2**16),
    drops=st.booleans(),
)  # fmt: skip
def test_any_sequence_gives_bitwise_what_messages_give(world: int, ops: list[Any], seed: int, drops: bool) -> None:
    def fn(rank: int) -> None:
        pairwise = PairwiseTransport(None)
        shared = make_shared(PairwiseTransport(None))
        assert isinstance(shared, SharedTransport)
        for turn in range(3):
            choice = random.Random(f"{seed} {rank} {turn}")
            order = choice.sample(range(len(ops)), len(ops))
            lost = {i for i in range(len(ops)) if drops and choice.random() < 0.3}
            expected = play(pairwise, rank, world, ops, order, lost)
            for a, b in zip(expected, play(shared, rank, world, ops, order, lost), strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        Communicator().barrier()
        # All space is free again, that of dropped handles too.
        shared._segment.lend(10**6, 64, shared._readers)
        assert shared._segment.num_bytes_lent == 64

    sim.run(world, fn, seed=seed)


def test_a_slow_reader_finds_what_was_sent() -> None:
    """A rank goes on to write into its buffers, and to later collectives, before another has read the first one."""

    def fn(rank: int) -> None:
        transport = make_shared(PairwiseTransport(None))
        handles, fulls = [], [torch.zeros(8) for _ in range(20)]
        for i in range(20):
            shard = torch.full((4,), float(10 * i + rank))
            handles.append(transport.all_gather(fulls[i], shard))
            shard.fill_(-1.0)
            if rank == 0:
                handles[-1].wait()
        for i in reversed(range(20)):
            handles[i].wait()
            assert fulls[i].tolist() == [10.0 * i] * 4 + [10.0 * i + 1] * 4

    for seed in range(4):
        sim.run(2, fn, seed=seed)


def test_a_room_that_is_dropped_is_no_other_before_everybody_has_read_it() -> None:
    def fn(rank: int) -> None:
        transport = make_shared(PairwiseTransport(None))
        assert isinstance(transport, SharedTransport)
        handles, outs, places = [], [torch.zeros(4) for _ in range(20)], set()
        for i in range(20):
            room = transport.room(32)
            assert room is not None
            full = room.view(torch.float32).fill_(10.0 * i + rank)
            places.add(full.data_ptr())
            handles.append(transport.reduce_scatter(full, outs[i], 1.0))
            if rank == 0:
                handles[-1].wait()
            del room, full
        for i in reversed(range(20)):
            handles[i].wait()
            assert outs[i].tolist() == [20.0 * i + 1] * 4
        assert len(places) == 20 or rank == 0
        Communicator().barrier()
        room = transport.room(32)
        assert room is not None
        assert room.data_ptr() in places  # and then it is

    for seed in range(4):
        sim.run(2, fn, seed=seed)


def test_without_shared_memory_there_is_no_room() -> None:
    def fn(rank: int) -> None:
        assert PairwiseTransport(None).room(64) is None
        shared = make_shared(PairwiseTransport(None))
        assert shared.room(0) is None

    sim.run(2, fn)
    assert Communicator().room(64) is None


@pytest.mark.dear
def test_more_in_flight_than_can_be_told_apart_is_refused() -> None:
    def fn(rank: int) -> None:
        transport = make_shared(PairwiseTransport(None))
        handles = [transport.all_gather(torch.zeros(2), torch.ones(1)) for _ in range(segments._NUM_WORDS)]
        with pytest.raises(RuntimeError, match="at most 1024 may be in flight"):
            transport.all_gather(torch.zeros(2), torch.ones(1))
        for handle in handles:
            handle.wait()

    sim.run(2, fn)


def test_a_communicator_that_is_closed_or_dropped_gives_the_memory_back() -> None:
    def num_files() -> int:
        paths = list(Path("/proc/self/fd").iterdir())
        return sum(os.path.lexists(path) and "memfd:zoo" in os.readlink(path) for path in paths)

    def num_maps() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:zoo")

    def fn(rank: int) -> None:
        comm = Communicator()
        assert comm.share_memory()
        assert comm.share_memory()
        comm.all_gather(torch.zeros(2), torch.ones(1)).wait()
        if rank == 0:
            comm.close()
            assert not isinstance(comm._transport, SharedTransport)

    gc.collect()
    before = num_files(), num_maps()
    sim.run(2, fn, transport="shared")
    gc.collect()
    assert (num_files(), num_maps()) == before
    sim.run(2, lambda rank: Communicator().share_memory() and pytest.fail("shares"), transport="pairwise")
    sim.run(2, lambda rank: Communicator().share_memory() and pytest.fail("shares"))
    assert not Communicator().share_memory()


# The segment ---------------------------------------------------------------------------------------------------------


def opened(own: OwnSegment, size: int = 2) -> PeerSegment:
    return PeerSegment(os.getpid(), own.fd, own.nonce, size)


def test_a_segment_that_grows_is_read_to_its_end() -> None:
    own, peer = OwnSegment(0, 2), OwnSegment(1, 2)
    reader, acks = opened(own), opened(peer)
    first = len(own._bytes)
    small = own.lend(0, 64, [acks])
    large = own.lend(1, 3 * first, [acks])
    own.view(large, 3 * first, torch.uint8)[-8:] = 7
    own.view(small, 64, torch.uint8).fill_(5)
    assert reader.view(large, 3 * first, torch.uint8)[-8:].tolist() == [7] * 8
    assert reader.view(small, 64, torch.int64).tolist() == [0x0505050505050505] * 8
    peer.note_read(0, [0])
    assert own.lend(2, 64, [acks]) == small  # what was read is lent again
    assert own.num_bytes_lent == large - small + 3 * first


def test_what_is_large_takes_no_memory_once_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_KEPT_BYTES", 1 << 16)
    own, peer = OwnSegment(0, 2), OwnSegment(1, 2)
    acks = opened(peer)

    def taken() -> int:
        return 512 * os.fstat(own.fd).st_blocks

    before, num_bytes = taken(), 1 << 20
    room = own.room(num_bytes, [acks]).fill_(1)
    assert own.lend(0, num_bytes, [acks], at=own.room_of(room)) == own.room_of(room)
    small = own.view(own.lend(1, 1 << 12, [acks]), 1 << 12, torch.uint8).fill_(3)
    assert taken() >= before + num_bytes
    peer.note_read(0, [0])
    own.lend(2, 64, [acks])
    assert room.sum() == num_bytes  # somebody has it still
    for number in (3, 4):
        own.lend(number, num_bytes, [acks], at=own.room_of(room))
    del room
    peer.note_read(3, [0])
    own.lend(5, 64, [acks])
    assert taken() >= before + num_bytes  # it was sent twice, and is read once
    peer.note_read(4, [0])
    own.lend(6, 64, [acks])
    assert taken() < before + num_bytes // 2
    room = own.room(num_bytes, [acks]).fill_(1)
    assert taken() >= before + num_bytes
    del room
    assert taken() < before + num_bytes // 2
    assert small.sum() == 3 << 12


@pytest.mark.parametrize(
    ("low", "num_bytes"), [(0, 64), (-64, 64), (1 << 20, -64), ((1 << 20) + 8, 8), (1 << 20, 1 << 40)]
)
def test_a_block_outside_of_the_segment_is_refused(low: int, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="is not in the shared memory"):
        opened(OwnSegment(0, 2)).view(low, num_bytes, torch.uint8)


def test_another_file_is_not_taken_for_the_segment(tmp_path: Path) -> None:
    own = OwnSegment(0, 2)
    with pytest.raises(OSError, match="another group"):
        PeerSegment(os.getpid(), own.fd, bytes(16), 2)
    with open(tmp_path / "file", "wb") as file, pytest.raises(OSError, match="not a segment"):
        PeerSegment(os.getpid(), file.fileno(), own.nonce, 2)
    fd = os.memfd_create("zoo", os.MFD_ALLOW_SEALING)
    with pytest.raises(OSError, match="group of 2 ranks"):
        PeerSegment(os.getpid(), fd, own.nonce, 2)
    os.close(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(own.fd, 0)
    with open(tmp_path / "file", "wb") as file, pytest.raises(OSError, match="not a pipe"):
        open_pipe(os.getpid(), file.fileno())


# Headers through pipes -----------------------------------------------------------------------------------------------


def test_headers_are_found_by_their_key_and_forgotten() -> None:
    inbox = Inbox()
    post = PipePost({1: inbox}, {1: open_pipe(os.getpid(), inbox.write_fd)}, 0.05)
    inbox.opened()
    waits = {i: post.exchange((5, i), 64 * i, 8)[0][1] for i in range(4)}
    post.forget((5, 2), 1)
    post.forget((5, 9), 1)
    assert waits[3]() == [3, 192, 8]
    assert waits[0]() == [0, 0, 8]
    post.forget((5, 1), 1)
    assert not inbox._here
    assert inbox._forgotten == {(5, 9)}
    with pytest.raises(TimeoutError, match=r"waited 0\.05 s"):
        waits[1]()
    for i in range(10, 5000):  # nobody waits for any of these: the pipe is emptied now and then
        post.exchange((5, i), 0, 8)
        post.forget((5, i), 1)
    assert not inbox._here.keys() - {(5, i) for i in range(4700, 5000)}
    del post
    with pytest.raises(ConnectionError, match="is gone"):
        waits[1]()


@pytest.mark.parametrize("wait", [lambda inbox: inbox.take((5, 1), 60.0), lambda inbox: inbox.look()])
def test_a_pipe_that_ends_waits_for_the_reason(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, asked = Inbox(), 0

    def reported() -> tuple[dict[int, str], str]:
        nonlocal asked
        asked += 1
        return ({1: "ValueError: what it was"} if asked > 3 else {}), ""

    monkeypatch.setattr(posts, "reported", reported)
    inbox.opened()  # by nobody
    with pytest.raises(ConnectionError, match="is gone"):
        wait(inbox)
    assert asked == 4


def test_a_peer_that_says_nothing_is_waited_for_so_long_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posts, "_REPORT_S", 0.1)
    inbox = Inbox()
    inbox.opened()
    with pytest.raises(ConnectionError, match="is gone"):
        inbox.look()


# Processes -----------------------------------------------------------------------------------------------------------


def in_processes(rank: int, world: int) -> bool:
    comm = Communicator()
    assert comm.share_memory()
    assert isinstance(comm._transport, SharedTransport)
    pairwise = PairwiseTransport(None)
    for turn in range(6):
        choice, own = random.Random(turn), random.Random(f"{turn} {rank}")
        kinds, sizes = ["all_gather", "reduce_scatter"], [0, 1, 999, 16_384, 50_000, 300_000]
        ops = [
            (
                choice.choice(kinds),
                choice.choice(sizes),
                choice.choice(DTYPES),
                choice.random() < 0.5,
                0.5,
                choice.random() < 0.5,
            )
            for _ in range(5)
        ]
        order = own.sample(range(5), 5)
        lost = {i for i in range(5) if turn % 2 and own.random() < 0.3}
        lost = {i for i in lost if ops[i][1]}  # empty messages are gloo's: dropping those is not tried here
        expected = play(pairwise, rank, world, ops, order, set())
        kept = [result for i, result in enumerate(expected) if i not in lost]
        for a, b in zip(kept, play(comm._transport, rank, world, ops, order, lost), strict=True):
            assert torch.equal(a, b)
    torch.distributed.barrier()
    return True


def test_processes_get_bitwise_what_messages_give() -> None:
    assert run_ranks(3, in_processes, 3) == dict.fromkeys(range(3), True)


def one_cannot(rank: int, world: int) -> bool:
    if rank == 1:
        from zoo.comm import shared

        def refuse(*args: object) -> None:
            raise PermissionError("not yours")

        shared.PeerSegment = refuse  # type: ignore[assignment, misc]
    comm = Communicator()
    assert not comm.share_memory()
    full = torch.empty(world * 50_000)
    comm.all_gather(full, torch.full((50_000,), float(rank))).wait()
    assert full.view(world, -1)[:, -1].tolist() == [float(r) for r in range(world)]
    return True


def test_where_one_rank_cannot_open_it_all_send_messages() -> None:
    assert run_ranks(3, one_cannot, 3) == dict.fromkeys(range(3), True)


def no_address_space(rank: int, world: int) -> bool:
    import resource

    if rank == 1:
        status = Path("/proc/self/status").read_text().split()
        used = int(status[status.index("VmSize:") + 1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + segments._FIRST_BYTES // 2, resource.RLIM_INFINITY))
    comm = Communicator()
    assert not comm.share_memory()
    full = torch.empty(world)
    comm.all_gather(full, torch.tensor([float(rank)])).wait()
    assert full.tolist() == [float(r) for r in range(world)]
    return True


def test_where_address_space_is_limited_all_send_messages() -> None:
    assert run_ranks(2, no_address_space, 2) == {0: True, 1: True}


WORKER = """
import os, signal, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from zoo.comm import Communicator, RankFailedError
rank, store, out, how = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
comm = Communicator()
assert comm.share_memory()
if how == "silent":
    comm._transport._post._timeout_s = 2.0
    comm._transport._small.wait_s = 2.0
full = torch.empty(200_000)
comm.all_gather(full, torch.full((100_000,), float(rank))).wait()
assert full[::100_000].tolist() == [0.0, 1.0]
if rank == 1:
    if how == "killed":
        if os.fork() == 0:  # as a worker of a DataLoader, which lives on
            while not (out / "done").exists():
                time.sleep(0.05)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    while not (out / "done").exists():
        time.sleep(0.05)
    os._exit(0)
handles = [comm.reduce_scatter(torch.ones(200_000), torch.empty(100_000)) for _ in range(2)]
handles.append(comm.all_reduce(torch.ones(10)))
begin = time.monotonic()
for handle in [*handles, *handles]:
    try:
        handle.wait()
    except RankFailedError as error:
        assert error.ranks == (1,), error
        text = str(error)
        assert ("its process is gone" if how == "killed" else "waited 2 s") in text and "rank 1 does not" in text, text
    else:
        raise AssertionError("a wait for a lost rank succeeded")
assert time.monotonic() - begin < 30
(out / "done").touch()
os._exit(0)
"""


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_lost_process_is_named_by_every_wait(how: str, tmp_path: Path) -> None:
    processes = [start(WORKER, r, tmp_path / "store", tmp_path, how) for r in range(2)]
    try:
        begin = time.monotonic()
        assert [process.wait(timeout=100) for process in processes] == [0, -9 if how == "killed" else 0]
        assert time.monotonic() - begin < 90
    finally:
        for process in processes:
            process.kill()


def test_a_header_that_does_not_belong_names_its_rank() -> None:
    def fn(rank: int) -> None:
        transport = make_shared(PairwiseTransport(None))
        assert isinstance(transport, SharedTransport)
        if rank == 1:
            exchange = transport._post.exchange
            transport._post.exchange = lambda key, low, n: exchange(key, low + 1, n)  # type: ignore[method-assign]
        handle = transport.all_gather(torch.zeros(2), torch.ones(1))
        for _ in range(2):
            if rank == 0:
                with pytest.raises(RankFailedError, match="rank 1 announced block 0 of 4 bytes at") as caught:
                    handle.wait()
                assert caught.value.ranks == (1,)
            else:
                handle.wait()

    sim.run(2, fn)
