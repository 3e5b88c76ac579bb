"""The communicator on simulated ranks: values, accounting, the check; and the pairwise transport in real processes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import run_ranks
from tests.profiles import examples
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.comm import CollectiveMismatchError, CommsLog, Communicator, exchange, init_distributed


def values(rank: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * seed + rank))


@examples(times=2)
@given(
    world=st.integers(1, 8),
    length=st.integers(0, 9),
    seed=st.integers(0, 50),
    check=st.booleans(),
    mode=st.sampled_from([{}, {"semantics": "nccl"}, {"transport": "pairwise"}, {"transport": "shared"}]),
)
def test_collectives_compute_what_they_say(
    world: int, length: int, seed: int, check: bool, mode: dict[str, str]
) -> None:
    def fn(rank: int) -> None:
        comm = Communicator(check=check)
        assert (comm.rank, comm.size) == (rank, world)
        assert comm.share_memory() == (mode.get("transport") == "shared" and world > 1)
        full = torch.full((world * length,), float("nan"))
        handle = comm.all_gather(full, values(rank, length))
        handle.wait()
        handle.wait()
        assert torch.equal(full, torch.cat([values(r, length) for r in range(world)]))
        everyone = [values(r, world * length, 1) for r in range(world)]
        total = everyone[0].clone()
        for part in everyone[1:]:
            total += part
        mine = slice(rank * length, (rank + 1) * length)
        out = torch.empty(length)
        comm.reduce_scatter(everyone[rank].clone(), out, scale=0.5).wait()
        assert torch.equal(out, total[mine] * 0.5)
        inplace = everyone[rank].clone()
        comm.reduce_scatter(inplace, inplace[mine]).wait()
        assert torch.equal(inplace[mine], total[mine])
        tensor = values(rank, length, 2)
        comm.all_reduce(tensor, "max").wait()
        assert torch.equal(tensor, torch.stack([values(r, length, 2) for r in range(world)]).amax(0))
        tensor = values(rank, length, 3)
        comm.broadcast(tensor, world - 1).wait()
        assert torch.equal(tensor, values(world - 1, length, 3))

    sim.run(world, fn, seed=seed, **mode)


@examples(times=2)
@given(world=st.integers(1, 8), length=st.integers(0, 9), check=st.booleans())
def test_all_to_all_transposes_the_chunks(world: int, length: int, check: bool) -> None:
    def fn(rank: int) -> None:
        comm = Communicator(check=check)
        out = torch.full((world * length,), float("nan"))
        comm.all_to_all(out, values(rank, world * length)).wait()
        mine = slice(rank * length, (rank + 1) * length)
        assert torch.equal(out, torch.cat([values(r, world * length)[mine] for r in range(world)]))

    sim.run(world, fn)


@examples(times=2)
@given(
    world=st.integers(1, 4),
    dims=st.permutations([0, 1, 2]),
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=3),
    negative=st.booleans(),
    check=st.booleans(),
)
def test_exchange_moves_the_split_and_gradients_go_back(
    world: int, dims: list[int], sizes: list[tuple[int, int, int]], negative: bool, check: bool
) -> None:
    split, join, _ = dims
    shapes = [tuple(size * world if dim == split else size for dim, size in enumerate(s)) for s in sizes]

    def part(rank: int, position: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * position + rank)
        return torch.randn(shapes[position], generator=generator, dtype=torch.float64)

    def fn(rank: int) -> None:
        comm = Communicator(check=check)
        given = [part(rank, i).requires_grad_() for i in range(len(shapes))]
        way = {"split_dim": split - 3 * negative, "join_dim": join - 3 * negative}
        out = exchange(given, comm, **way)
        for i, tensor in enumerate(out):
            whole = torch.cat([part(r, i) for r in range(world)], dim=join)
            assert torch.equal(tensor, whole.chunk(world, dim=split)[rank])
        # d/dx of Σ x²/2 over what every rank got is x on the rank that gave it; its derivative is 1.
        loss = sum((tensor.square().sum() / 2 for tensor in out), start=torch.zeros(()).double())
        grads = torch.autograd.grad(loss, given, create_graph=True)
        assert all(torch.equal(g, x) for g, x in zip(grads, given, strict=True))
        second = torch.autograd.grad(sum(g.sum() for g in grads), given)
        assert all(torch.equal(g, torch.ones_like(x)) for g, x in zip(second, given, strict=True))
        if world > 1:
            assert comm.log.ops["all_to_all"].count == 4  # x, its gradient, and both of these in the second pass

    sim.run(world, fn)


def test_mistakes_of_an_exchange_are_named() -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        with pytest.raises(ValueError, match=r"\(4, 3\) to split along dim 1 over 2 ranks; 2 must divide 3"):
            exchange([torch.zeros(4, 3)], comm, split_dim=1, join_dim=0)
        with pytest.raises(ValueError, match="two different dims"):
            exchange([torch.zeros(4, 4)], comm, split_dim=1, join_dim=-1)
        with pytest.raises(ValueError, match="two different dims"):
            exchange([torch.zeros(4, 4)], comm, split_dim=2, join_dim=0)
        with pytest.raises(ValueError, match=r"float32.*float64.*one dtype"):
            exchange([torch.zeros(2, 2), torch.zeros(2, 2).double()], comm, split_dim=0, join_dim=1)
        with pytest.raises(ValueError, match="6 elements to send and room for 4 on 2 ranks"):
            comm.all_to_all(torch.zeros(4), torch.zeros(6))
        with pytest.raises(ValueError, match="3 elements"):
            comm.all_to_all(torch.zeros(3), torch.zeros(3))

    sim.run(2, fn)


def test_wire_bytes_follow_the_definition() -> None:
    def fn(rank: int) -> CommsLog:
        comm = Communicator()
        full = torch.zeros(40)
        comm.all_gather(full, torch.zeros(10)).wait()
        comm.all_gather(full, torch.zeros(10)).wait()
        comm.reduce_scatter(full, torch.zeros(10)).wait()
        comm.all_reduce(full).wait()
        comm.all_to_all(torch.zeros(40), full).wait()
        return comm.log

    log = sim.run(4, fn)[0]
    assert (log.ops["all_gather"].count, log.ops["all_gather"].message_bytes) == (2, 320)
    assert log.ops["all_gather"].wire_bytes == 240
    assert log.ops["reduce_scatter"].wire_bytes == 120
    assert log.ops["all_reduce"].wire_bytes == 240
    assert (log.ops["all_to_all"].message_bytes, log.ops["all_to_all"].wire_bytes) == (160, 120)
    assert log.wire_bytes == 720
    assert log.ops["all_gather"].time_s > 0
    assert log.ops["all_gather"].bus_bandwidth > 0
    assert log.table().count("\n") == 4
    log.reset()
    assert log.wire_bytes == 0


def test_the_check_names_the_ranks_that_differ() -> None:
    def fn(rank: int) -> None:
        comm = Communicator(check=True)
        comm.all_reduce(torch.zeros(3)).wait()
        if rank == 2:
            comm.reduce_scatter(torch.zeros(8), torch.zeros(2))
        else:
            comm.all_gather(torch.zeros(8), torch.zeros(2))

    with pytest.raises(sim.RankError) as caught:
        sim.run(4, fn)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    text = str(caught.value)
    assert "rank 2 called reduce_scatter of 8 float32 as its collective number 2" in text
    assert "ranks 0, 1, 3 called all_gather of 8 float32" in text


def test_a_mesh_axis_and_a_group_can_be_given() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        inner = Communicator(mesh["inner"])
        assert (inner.rank, inner.size) == (rank % 2, 2)
        tensor = torch.tensor([float(rank)])
        inner.all_reduce(tensor).wait()
        assert tensor.item() == (1.0 if rank < 2 else 5.0)
        with pytest.raises(ValueError, match=r"mesh\['axis_name'\]"):
            Communicator(mesh)
        pair = dist.new_group([1, 3])
        if rank in (1, 3):
            comm = Communicator(pair)
            tensor = torch.tensor([float(rank)])
            comm.broadcast(tensor, 1).wait()
            assert tensor.item() == 3.0
        else:
            with pytest.raises(ValueError, match="not a member"):
                Communicator(pair)

    sim.run(4, fn)


def test_user_errors_say_what_is_allowed() -> None:
    comm = Communicator()
    assert (comm.rank, comm.size, comm.backend) == (0, 1, "local")
    with pytest.raises(ValueError, match=r"op='avg'.*'sum', 'max' and 'min'"):
        comm.all_reduce(torch.zeros(1), "avg")
    with pytest.raises(ValueError, match="src=1"):
        comm.broadcast(torch.zeros(1), 1)
    with pytest.raises(ValueError, match="a timeout of 0:00:00"):
        init_distributed(timeout=timedelta(0))


def every_collective(rank: int, world: int) -> bool:
    comm = Communicator()

    def data(r: int, n: int) -> torch.Tensor:
        return torch.randn(n, generator=torch.Generator().manual_seed(r))

    for n in (0, 1, 5, 100_000):
        everyone = [data(r, world * n) for r in range(world)]
        total = everyone[0].clone()
        for part in everyone[1:]:
            total += part
        mine = slice(rank * n, (rank + 1) * n)
        full, out, inplace = torch.empty(world * n), torch.empty(n), everyone[rank].clone()
        out2 = torch.empty(world * n)
        handles = [
            comm.all_gather(full, data(rank, n)),
            comm.reduce_scatter(everyone[rank].clone(), out, scale=0.25),
            comm.reduce_scatter(inplace, inplace[mine]),
            comm.all_to_all(out2, everyone[rank].clone()),
        ]
        for handle in handles:
            handle.wait()
        assert torch.equal(out2, torch.cat([part[mine] for part in everyone]))
        assert torch.equal(full, torch.cat([data(r, n) for r in range(world)]))
        assert torch.equal(out, total[mine] * 0.25)
        assert torch.equal(inplace[mine], total[mine])
    torch.distributed.barrier()
    return True


def test_the_pairwise_transport_on_three_gloo_processes() -> None:
    assert run_ranks(3, every_collective, 3) == dict.fromkeys(range(3), True)
