"""The comms log: what it counts of messages and objects, and how it prints."""

from __future__ import annotations

import pytest
import torch

from zoo import sim
from zoo.comm import CollectiveMismatchError, CommsLog, Communicator


def test_a_message_counts_where_it_is_sent() -> None:
    def fn(rank: int) -> CommsLog:
        comm = Communicator()
        tensor = torch.zeros(10)
        (comm.recv(tensor, 0) if rank else comm.send(tensor, 1)).wait()
        return comm.log

    sender, receiver = sim.run(2, fn)
    assert (list(sender.ops), sender.wire_bytes) == (["send"], 40)
    assert (list(receiver.ops), receiver.wire_bytes) == (["recv"], 0)


def test_an_object_counts_its_pickled_size() -> None:
    def fn(rank: int) -> tuple[int, int]:
        comm = Communicator()
        comm.broadcast_object(b"x" * 10_000 if rank == 1 else None, src=1)
        row = comm.log.ops["broadcast_object"]
        assert row.wire_bytes == row.message_bytes
        return row.count, row.message_bytes

    for count, num_bytes in sim.run(3, fn):
        assert count == 1
        assert 10_000 < num_bytes < 10_200


def test_a_broadcast_from_two_ranks_is_named() -> None:
    def fn(rank: int) -> None:
        comm = Communicator(check=True)
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 called broadcast_object\[src=1\]"):
            comm.broadcast_object(rank, src=rank)
        with pytest.raises(ValueError, match=r"broadcast_object got src=2; the group has ranks 0 to 1\."):
            comm.broadcast_object(rank, src=2)

    sim.run(2, fn)


def test_the_table_says_what_was_counted() -> None:
    log = CommsLog()
    log.issued("all_gather", 4_000_000_000, 4).host_time_s = 1.5
    log.issued("barrier", 0, 4)
    header, gather, barrier = log.table().splitlines()
    assert header.split() == ["op", "count", "message", "MB", "wire", "MB", "time", "ms", "bus", "GB/s"]
    assert gather.split() == ["all_gather", "1", "4000.000", "3000.000", "1500.00", "2.000"]
    assert barrier.split() == ["barrier", "1", "0.000", "0.000", "0.00", "0.000"]


@pytest.mark.parametrize(("num_local", "near", "far"), [(4, "3.000", "0.000"), (1, "0.000", "3.000")])
def test_the_table_of_one_node_and_of_nodes_of_one_rank(num_local: int, near: str, far: str) -> None:
    """All bytes are of one kind; where nodes are known both are shown."""
    log = CommsLog()
    log.issued("all_gather", 4_000_000, 4, num_local)
    header, row = log.table().splitlines()
    assert "intra MB" in header
    assert "inter MB" in header
    assert row.split()[:6] == ["all_gather", "1", "4.000", "3.000", near, far]
