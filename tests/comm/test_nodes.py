"""Groups over nodes: bytes that leave a node told apart from those that stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import run_ranks
from tests.profiles import examples
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.comm import Communicator
from zoo.comm.nodes import node_of_each, ranks_per_node
from zoo.layout import Mesh


@examples(times=2)
@given(nodes=st.integers(1, 4), local=st.integers(1, 4), length=st.integers(1, 3))
def test_bytes_are_counted_by_where_they_go(nodes: int, local: int, length: int) -> None:
    """Against what every rank would send in messages, one for each peer."""
    world = nodes * local
    peers_near, peers_far = local - 1, world - local

    def fn(rank: int) -> None:
        comm = Communicator(nodes=local)
        assert comm.nodes == tuple(r // local for r in range(world))
        full, shard, piece = torch.zeros(world * length), torch.zeros(length), 4 * length
        comm.all_gather(full, shard).wait()
        comm.reduce_scatter(full, shard).wait()
        comm.all_to_all(torch.empty_like(full), full).wait()
        comm.all_reduce(full).wait()
        for op, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 1), ("all_reduce", 2)):
            if world > 1:
                row = comm.log.ops[op]
                assert (row.intra_bytes, row.inter_bytes) == (times * piece * peers_near, times * piece * peers_far)
                assert row.intra_bytes + row.inter_bytes == row.wire_bytes
        assert comm.log.inter_bytes == 5 * piece * peers_far

    sim.run(world, fn)


def test_nodes_can_be_described_in_four_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(rank: int) -> None:
        expected = (0, 0, 0, 1, 1, 1)
        assert Communicator().nodes is None
        assert Communicator(nodes=3).nodes == expected
        assert Communicator(nodes=Mesh(("node", "local"), (2, 3))).nodes == expected
        assert Communicator(nodes=Mesh(("pipe", "node", "local"), (1, 2, 3))).nodes == expected
        assert Communicator(nodes=expected).nodes == expected
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("node", "local"))
        whole = Communicator(mesh)
        assert (whole.rank, whole.size, whole.nodes) == (rank, 6, expected)
        assert Communicator(mesh["local"], nodes=3).nodes == (rank // 3,) * 3
        assert Communicator(mesh["node"], nodes=3).nodes == (0, 1)
        with pytest.raises(ValueError, match="6 ranks with an axis"):
            Communicator(nodes=Mesh(("node", "local"), (2, 2)))
        with pytest.raises(ValueError, match="2 entries for a group of 6"):
            Communicator(nodes=[0, 1])
        with pytest.raises(ValueError, match="0 ranks of a node"):
            Communicator(nodes=0)

    sim.run(6, fn)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert sim.run(4, lambda rank: Communicator().nodes) == [(0, 0, 1, 1)] * 4


def test_a_mesh_of_some_of_the_ranks() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("node", "model", "local"))
        comm = Communicator(mesh["node", "local"])
        tensor = torch.tensor([float(2**rank)])
        comm.all_reduce(tensor).wait()
        members = (0, 1, 4, 5) if rank in (0, 1, 4, 5) else (2, 3, 6, 7)
        assert tensor.item() == sum(2.0**m for m in members)
        assert comm.nodes == (0, 0, 1, 1)

    sim.run(8, fn)


def test_regular_nodes() -> None:
    assert ranks_per_node([0, 0, 1, 1]) == 2
    assert ranks_per_node([3, 3, 3]) == 3
    assert ranks_per_node([0, 1, 0, 1]) is None
    assert ranks_per_node([0, 0, 1]) is None


def test_the_table_shows_both_kinds_of_bytes() -> None:
    def fn(rank: int) -> list[str]:
        tables = []
        for nodes in (None, 2):
            comm = Communicator(nodes=nodes)
            comm.all_gather(torch.zeros(4_000_000), torch.zeros(1_000_000)).wait()
            tables.append(comm.log.table())
        return tables

    plain, known = sim.run(4, fn)[0]
    assert "inter MB" not in plain
    header, row = known.splitlines()
    assert header.split()[:8] == ["op", "count", "message", "MB", "wire", "MB", "intra", "MB"]
    assert row.split()[:6] == ["all_gather", "1", "16.000", "12.000", "4.000", "8.000"]


def gather_near_and_far(rank: int) -> dict[str, Any]:
    comm = Communicator(nodes=2)
    local = comm.partition([[0, 1], [2, 3]], name="local")
    across = comm.partition([[0, 2], [1, 3]], name="across")
    found: dict[str, Any] = {}
    for name, part in (("local", local), ("across", across)):
        full = torch.empty(2, dtype=torch.int8)
        part.all_gather(full, torch.tensor([rank], dtype=torch.int8)).wait()
        swapped = torch.empty_like(full)
        part.all_to_all(swapped, torch.tensor([10 * rank, 10 * rank + 1], dtype=torch.int8)).wait()
        tensor = torch.tensor([float(rank)])
        part.all_reduce(tensor).wait()
        found[name] = [full.tolist(), swapped.tolist(), tensor.item()]
        found["timeout_s"] = part.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    found["bytes"] = [comm.log.ops["all_gather"].intra_bytes, comm.log.ops["all_gather"].inter_bytes]
    torch.distributed.barrier()
    return found


def test_partitions_on_gloo() -> None:
    everything = run_ranks(4, gather_near_and_far, group_timeout_s=77)
    for rank in range(4):
        found = everything[rank]
        near, far = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert found["local"] == [near, [10 * r + rank % 2 for r in near], sum(near)]
        assert found["across"] == [far, [10 * r + rank // 2 for r in far], sum(far)]
        assert found["bytes"] == [1, 1]
        assert found["timeout_s"] == 77


def test_nodes_may_be_a_tensor_and_are_nothing_else() -> None:
    found = node_of_each(torch.tensor([0, 0, 1, 1]), range(4))  # type: ignore[arg-type]
    assert found == (0, 0, 1, 1)
    assert ranks_per_node(found) == 2
    for wrong, said in ((2.0, r"nodes=2.0; it takes the node of each"), (torch.tensor([0]), "has 1 entries")):
        with pytest.raises(ValueError, match=said):
            node_of_each(wrong, range(4))  # type: ignore[arg-type]
