"""Partitions, duplicates and axes of a mesh: groups with names of their own, kept, and destroyed."""

from __future__ import annotations

import gc
from pathlib import Path
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import start
from tests.profiles import examples
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.comm import CollectiveMismatchError, Communicator


@examples(times=2)
@given(world=st.integers(1, 8), data=st.data(), check=st.booleans())
def test_a_partition_gives_every_rank_its_group(world: int, data: st.DataObject, check: bool) -> None:
    colours = data.draw(st.lists(st.integers(0, 2), min_size=world, max_size=world))
    order = data.draw(st.permutations(range(world)))
    groups = [found for c in range(3) if (found := [r for r in order if colours[r] == c])]

    def fn(rank: int) -> None:
        comm = Communicator(check=check, nodes=2)
        members = next(group for group in groups if rank in group)
        for name in ("first", "second"):  # the same ranks under another name are another group
            part = comm.partition(groups, name=name)
            assert part is comm.partition(groups, name=name)
            assert (part.rank, part.size) == (members.index(rank), len(members))
            assert part.nodes == tuple(m // 2 for m in members)
            tensor = torch.tensor([float(10**rank)], dtype=torch.float64)
            part.all_reduce(tensor).wait()
            assert tensor.item() == sum(10.0**m for m in members)
            full = torch.empty(len(members), dtype=torch.int64)
            part.all_gather(full, torch.tensor([rank])).wait()
            assert full.tolist() == members
        alone = part.partition([[r] for r in range(part.size)], name="alone")
        assert (alone.rank, alone.size, alone.num_local) == (0, 1, 1)
        assert part.log is comm.log
        assert comm.partition([range(world)], name="all") is comm

    sim.run(world, fn)


def test_groups_of_some_ranks_do_not_upset_later_ones() -> None:
    """Ranks of one part make groups that others know nothing of; then all make groups, in torch's ways too."""

    def fn(rank: int) -> None:
        half = Communicator().partition([[0, 1, 2], [3]], name="part")
        if rank < 3:
            pair = half.partition([[0, 1], [2]], name="pair")
            assert pair.size == (2 if rank < 2 else 1)
            assert half.duplicate("other").size == 3
        group = dist.new_group([1, 2, 3])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=mesh.get_group("a"))
        if rank:
            dist.all_reduce(tensor, group=group)
        Communicator().partition([[0, 3], [1, 2]], name="last").all_reduce(tensor).wait()
        assert tensor.item() == (8.0 if rank in (0, 3) else 12.0)

    sim.run(4, fn)


def test_what_is_no_partition_is_refused() -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        for groups in ([[0]], [[0, 1], [1]], [[0, 1, 2]], [[0, 1], []], []):
            with pytest.raises(ValueError, match="each of the ranks 0 to 1 is once"):
                comm.partition(groups, name="wrong")
        with pytest.raises(CollectiveMismatchError, match="rank 1 called partition 'odd'"):
            Communicator(check=True).partition([[0], [1]] if rank else [[0, 1]], name="odd")

    sim.run(2, fn)


def test_a_duplicate_is_a_group_of_its_own() -> None:
    def fn(rank: int) -> None:
        comm = Communicator(nodes=2)
        other = comm.duplicate("messages")
        assert other is comm.duplicate("messages") is not comm
        assert (other.rank, other.size, other.nodes, other.log) == (rank, 4, comm.nodes, comm.log)
        a, b = torch.ones(1), torch.full((1,), 2.0)
        # In different order on two ranks: on one group these would meet each other.
        order = [(comm, a), (other, b)] if rank else [(other, b), (comm, a)]
        for handle in [one.all_reduce(tensor) for one, tensor in order]:
            handle.wait()
        assert (a.item(), b.item()) == (4.0, 8.0)

    sim.run(4, fn)
    assert Communicator().duplicate("alone").size == 1


def test_closing_destroys_what_was_made() -> None:
    def fn(rank: int) -> None:
        before = set(dist.distributed_c10d._world.pg_map)
        comm = Communicator()
        for _ in range(2):  # names are free again, and numbers of the store are not
            part = comm.partition([[0, 1], [2, 3]], name="pair")
            inner = part.duplicate("inner")
            tensor = torch.ones(1)
            inner.all_reduce(tensor).wait()
            assert tensor.item() == 2.0
            comm.close()
            comm.close()
            assert set(dist.distributed_c10d._world.pg_map) == before
            for closed in (part, inner):
                with pytest.raises(ValueError, match="was closed; make another one"):
                    closed.all_reduce(tensor)
        comm.all_reduce(torch.ones(1)).wait()  # its group is the job's

    sim.run(4, fn)


@examples(times=2)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda s: torch.Size(s).numel() <= 12),
    data=st.data(),
)
def test_axes_of_a_mesh_are_flattened_in_its_order(shape: list[int], data: st.DataObject) -> None:
    names = ("data", "expert", "model")[: len(shape)]
    axes = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    world = torch.Size(shape).numel()

    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
        comm = Communicator.of_axes(mesh, axes)
        place = mesh.get_coordinate()
        assert place is not None
        here = tuple(slice(None) if n in axes else p for n, p in zip(names, place, strict=True))
        members = mesh.mesh[here].flatten().tolist()
        assert (comm.rank, comm.size) == (members.index(rank), len(members))
        full = torch.empty(len(members), dtype=torch.int64)
        comm.all_gather(full, torch.tensor([rank])).wait()
        assert full.tolist() == members
        out = torch.empty(1, dtype=torch.int64)
        comm.reduce_scatter(torch.ones(len(members), dtype=torch.int64), out).wait()
        assert out.item() == len(members)
        comm.close()
        with pytest.raises(ValueError, match="takes one or more of these"):
            Communicator.of_axes(mesh, ["time"])

    sim.run(world, fn, transport=data.draw(st.sampled_from(["native", "pairwise"])))


WORKER = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from zoo.comm import Communicator
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timedelta(seconds=20))
comm = Communicator()
for _ in range(2):
    part = comm.partition([[0, 1], [2]], name="part")
    if rank < 2:
        tensor = torch.ones(1)
        part.duplicate("more").all_reduce(tensor).wait()
        assert tensor.item() == 2.0
    group = dist.new_group([1, 2])
    tensor = torch.ones(1)
    if rank:
        dist.all_reduce(tensor, group=group)
    comm.duplicate("other").all_reduce(tensor).wait()
    assert tensor.item() == 5.0
    comm.close()
dist.barrier()
dist.destroy_process_group()
"""


def test_groups_of_some_ranks_on_gloo(tmp_path: Path) -> None:
    processes = [start(WORKER, r, tmp_path / "store") for r in range(3)]
    try:
        assert [process.wait(timeout=100) for process in processes] == [0] * 3
    finally:
        for process in processes:
            process.kill()


def test_a_part_that_was_closed_is_made_anew() -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        for make in (lambda: comm.duplicate("more"), lambda: comm.partition([[0, 2], [1]], name="some")):
            first, full = make(), torch.zeros(1)
            group = ref(first.group) if first.group is not None else None
            assert make() is first
            first.close()
            second = make()
            assert (second is not first) == (first.size > 1)
            second.all_reduce(full.fill_(1.0)).wait()
            assert full.item() == second.size
            del first
            gc.collect()
            assert group is None or group() is None  # with its sockets
        comm.close()

    sim.run(3, fn)
