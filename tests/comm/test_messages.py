"""Messages from rank to rank, uneven all-to-all, barriers and objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.versions import needs_groups_of_any_backend

from zoo import sim
from zoo.comm import CollectiveMismatchError, Communicator, RankFailedError, Recv, Send


@needs_groups_of_any_backend
@examples(times=2)
@given(
    world=st.integers(2, 5),
    length=st.integers(0, 4),
    seed=st.integers(0, 50),
    check=st.booleans(),
    semantics=st.sampled_from(["gloo", "nccl"]),
)
def test_a_batch_sends_and_receives_at_once(world: int, length: int, seed: int, check: bool, semantics: str) -> None:
    """Every rank sends two messages to every other; those of a pair come in their order."""

    def data(source: int, target: int, number: int) -> torch.Tensor:
        return torch.full((length + number,), 100.0 * source + 10.0 * target + number)

    def fn(rank: int) -> None:
        comm = Communicator(check=check, nodes=2)
        others = [r for r in range(world) if r != rank]
        got = {(r, n): torch.empty(length + n) for r in others for n in range(2)}
        sends = [Send(data(rank, r, n), r, f"number {n}") for r in others for n in range(2)]
        recvs = [Recv(tensor, r, f"number {n}") for (r, n), tensor in got.items()]
        handle = comm.batch(sends + recvs if rank % 2 else recvs + sends)
        handle.wait()
        handle.wait()
        for (r, n), tensor in got.items():
            assert torch.equal(tensor, data(r, rank, n))
        row, size = comm.log.ops["send"], 4 * (2 * length + 1)
        near = sum(r // 2 == rank // 2 for r in others)
        assert (row.count, row.message_bytes, row.wire_bytes) == (
            2 * len(others),
            size * len(others),
            row.message_bytes,
        )
        assert (row.intra_bytes, row.inter_bytes) == (size * near, size * (len(others) - near))
        row = comm.log.ops["recv"]
        assert (row.count, row.message_bytes, row.wire_bytes) == (2 * len(others), size * len(others), 0)

    sim.run(world, fn, seed=seed, semantics=semantics)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_single_messages_in_a_ring(seed: int, check: bool) -> None:
    def fn(rank: int) -> None:
        comm = Communicator(check=check)
        got = torch.empty(2)
        handles = [comm.send(torch.full((2,), float(rank)), (rank + 1) % 3), comm.recv(got, (rank + 2) % 3)]
        for handle in handles:
            handle.wait()
        assert got.tolist() == [(rank + 2) % 3] * 2
        assert comm.batch([]).wait() is None

    sim.run(3, fn, seed=seed)


@pytest.mark.parametrize(
    ("size", "dtype", "label"), [(3, torch.float32, "x"), (2, torch.int32, "x"), (2, torch.float32, "y")]
)
def test_the_check_names_both_ends_of_a_message(size: int, dtype: torch.dtype, label: str) -> None:
    def fn(rank: int) -> str:
        comm = Communicator(check=True)
        if rank == 2:
            return ""
        handle = (
            comm.send(torch.ones(2), 1, label="x")
            if rank == 0
            else comm.recv(torch.ones(size, dtype=dtype), 0, label=label)
        )
        texts = []
        for _ in range(2):
            with pytest.raises(CollectiveMismatchError) as caught:
                handle.wait()
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
        return texts[0]

    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(sim.DivergenceError):  # the message itself was never taken
        sim.run(3, fn)
    seen: list[str] = []
    with pytest.raises(sim.DivergenceError):
        sim.run(3, lambda rank: seen.append(fn(rank)))
    assert f"rank 1 has {size} {kind} from rank 0 to rank 1 ({label})" in "".join(seen)
    assert "rank 0 has 2 float32 from rank 0 to rank 1 (x)" in "".join(seen)


def test_the_check_tells_long_labels_apart_by_their_ends() -> None:
    def fn(rank: int) -> None:
        comm = Communicator(check=True)
        label = 300 * "x" + str(rank)
        message = torch.ones(2)
        with pytest.raises(CollectiveMismatchError, match=r"Ranks .* disagree about a message: .*xx\.\.\. "):
            (comm.send(message, 1, label=label) if rank == 0 else comm.recv(message, 0, label=label)).wait()

    with pytest.raises(sim.DivergenceError):  # the message itself was never taken
        sim.run(2, fn)


def test_a_checked_message_that_does_not_come_tells_from_whom() -> None:
    def fn(rank: int) -> None:
        comm = Communicator(check=True)
        if rank == 0:
            with pytest.raises(RankFailedError, match=r"rank 1 does not answer: .*check\": true"):
                comm.recv(torch.ones(2), 1).wait()

    sim.run(2, fn, group_timeout_s=5.0)


def test_mistakes_of_a_message_are_named() -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        for peer in (rank, 2, -1):
            with pytest.raises(ValueError, match=f"send to rank {peer} on rank {rank} of 2; allowed are the other"):
                comm.send(torch.ones(1), peer)
        with pytest.raises(ValueError, match=r"recv from rank .* strides \(1, 2\)"):
            comm.recv(torch.ones(2, 2).t(), 1 - rank)

    sim.run(2, fn)


@examples(times=2)
@given(world=st.integers(1, 5), width=st.integers(0, 2), data=st.data(), check=st.booleans())
def test_uneven_chunks_go_to_their_ranks(world: int, width: int, data: st.DataObject, check: bool) -> None:
    counts = data.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=world, max_size=world), min_size=world, max_size=world)
    )
    shape = (width,) if width else ()

    def part(source: int, target: int) -> torch.Tensor:
        return torch.full((counts[source][target], *shape), 10.0 * source + target)

    def fn(rank: int) -> None:
        comm = Communicator(check=check, nodes=2)
        given_ = torch.cat([part(rank, r) for r in range(world)])
        splits = [counts[r][rank] for r in range(world)]
        out = torch.full((sum(splits), *shape), float("nan"))
        comm.all_to_all_uneven(out, given_, splits, counts[rank]).wait()
        assert torch.equal(out, torch.cat([part(r, rank) for r in range(world)]))
        if world > 1:
            row, unit = comm.log.ops["all_to_all"], 4 * (width or 1)
            far = unit * sum(n for r, n in enumerate(counts[rank]) if r // 2 != rank // 2)
            near = unit * sum(n for r, n in enumerate(counts[rank]) if r // 2 == rank // 2 and r != rank)
            assert row.message_bytes == unit * sum(counts[rank])
            if sum(counts[rank]):
                assert (row.wire_bytes, row.intra_bytes, row.inter_bytes) == (near + far, near, far)

    sim.run(world, fn)


def test_splits_that_do_not_fit_are_named_on_every_rank() -> None:
    def fn(rank: int) -> None:
        comm = Communicator(check=True)
        with pytest.raises(ValueError, match=r"in_splits=\[1, 1\] for 3 rows on 2 ranks"):
            comm.all_to_all_uneven(torch.ones(2), torch.ones(3), [1, 1], [1, 1])
        with pytest.raises(CollectiveMismatchError, match="rank 1 gives 2 rows to rank 0, which expects 1"):
            comm.all_to_all_uneven(torch.ones(2), torch.ones(2 + rank), [1, 1], [1 + rank, 1])

    sim.run(2, fn)


@pytest.mark.parametrize("check", [False, True])
def test_objects_and_barriers(check: bool) -> None:
    def fn(rank: int) -> None:
        comm = Communicator(check=check)
        values: list[Any] = [{"rank": r, "more": "x" * 10 * r} for r in range(3)]
        comm.barrier()
        assert comm.all_gather_object(values[rank]) == values
        for src in range(3):
            assert comm.broadcast_object(values[rank] if rank == src else None, src) == values[src]
        with pytest.raises(ValueError, match="broadcast_object got src=3"):
            comm.broadcast_object(None, 3)
        log = comm.log.ops
        assert (log["barrier"].count, log["barrier"].wire_bytes) == (1, 0)
        assert log["broadcast_object"].count == 3
        row = log["all_gather_object"]
        assert row.count == 1
        assert 0 < row.wire_bytes == round(row.message_bytes * 2 / 3)

    sim.run(3, fn)
    alone = Communicator()
    alone.barrier()
    assert alone.all_gather_object(5) == [5]
    assert alone.broadcast_object(6) == 6


def test_the_check_knows_barriers_and_objects() -> None:
    def fn(rank: int) -> None:
        comm = Communicator(check=True)
        if rank:
            comm.barrier()
        else:
            comm.all_gather_object(0)

    with pytest.raises(sim.RankError, match="rank 0 called all_gather_object"):
        sim.run(2, fn)


class Event:
    """Stands for a CUDA event of a stream that is as far as ``now``."""

    now = 0.0

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at <= Event.now

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def test_time_between_events_is_counted_when_the_stream_has_passed_them() -> None:
    row = Communicator().log.issued("all_gather", 8, 2)
    row.spans = [(Event(1.0), Event(3.0)), (Event(4.0), Event(4.5))]
    Event.now = 2.0
    assert row.time_s == 0.0
    Event.now = 4.2
    assert row.time_s == 2.0
    Event.now = 5.0
    assert row.time_s == 2.5 == row.time_s
    assert not row.spans
