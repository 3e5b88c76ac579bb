"""Every collective against a direct computation, over world sizes, dtypes, shapes, splits and seeds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.versions import needs_groups_of_any_backend
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import _functional_collectives as funcol
from torch.distributed.distributed_c10d import _coalescing_manager

from zoo import sim

worlds = st.integers(1, 8)
seeds = st.integers(0, 10_000)
shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)
floats = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8])


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank + 1)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def in_order(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


@examples(times=2)
@given(world=worlds, shape=shapes, dtype=dtypes, seed=seeds)
def test_reductions_sum_in_rank_order_and_agree_bitwise(world, shape, dtype, seed):
    def fn(rank: int):
        whole = torch.stack([data(rank, shape, dtype, salt) for salt in range(world)])
        reduced = whole.clone()
        dist.all_reduce(reduced)
        rooted = whole.clone()
        dist.reduce(rooted, world - 1)
        part, flat = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        dist.reduce_scatter(part, list(whole.unbind(0)))
        dist.reduce_scatter_tensor(flat, whole)
        several = [whole.clone(), whole.clone() + 1]
        with _coalescing_manager():
            for tensor in several:
                dist.all_reduce(tensor)
        coalesced = torch.zeros(shape, dtype=dtype)
        with _coalescing_manager():
            dist.reduce_scatter_tensor(coalesced, whole)
        return whole, reduced, rooted, part, flat, several[0], coalesced

    results = sim.run(world, fn, seed=seed)
    expected = in_order([result[0] for result in results])
    assert same(results[world - 1][2], expected)
    for rank, (whole, reduced, rooted, part, flat, several, coalesced) in enumerate(results):
        assert same(reduced, expected)
        assert same(several, expected)
        assert rank == world - 1 or same(rooted, whole)
        for scattered in (part, flat, coalesced):
            assert same(scattered, expected[rank])


@examples(times=2)
@given(world=worlds, seed=seeds, dtype=floats)
def test_every_reduce_op(world, seed, dtype):
    names = ["AVG", "PRODUCT", "MIN", "MAX"]

    def fn(rank: int):
        found = {}
        for name in names:
            found[name] = data(rank, (5,), dtype)
            dist.all_reduce(found[name], getattr(dist.ReduceOp, name))
        for name in ("BAND", "BOR", "BXOR"):
            found[name] = data(rank, (5,), torch.int32)
            dist.all_reduce(found[name], getattr(dist.ReduceOp, name))
        found["PREMUL_SUM"] = data(rank, (5,), dtype)
        dist.all_reduce(found["PREMUL_SUM"], _make_nccl_premul_sum(0.5))
        return found

    given_floats = [data(rank, (5,), dtype) for rank in range(world)]
    given_ints = [data(rank, (5,), torch.int32) for rank in range(world)]
    expected = {
        "AVG": in_order(given_floats) / world,
        "PREMUL_SUM": in_order([tensor * 0.5 for tensor in given_floats]),
    }
    fold = {
        "PRODUCT": (torch.mul, given_floats),
        "MIN": (torch.minimum, given_floats),
        "MAX": (torch.maximum, given_floats),
        "BAND": (torch.bitwise_and, given_ints),
        "BOR": (torch.bitwise_or, given_ints),
        "BXOR": (torch.bitwise_xor, given_ints),
    }
    for name, (op, tensors) in fold.items():
        total = tensors[0]
        for tensor in tensors[1:]:
            total = op(total, tensor)
        expected[name] = total
    for result in sim.run(world, fn, seed=seed):
        for name, value in expected.items():
            assert same(result[name], value), name


@examples(times=2)
@given(world=worlds, shape=shapes, dtype=dtypes, seed=seeds, root=st.integers(0, 7))
def test_gathers_scatters_and_broadcast(world, shape, dtype, seed, root):
    root %= world
    values = [data(rank, shape, dtype) for rank in range(world)]

    def fn(rank: int):
        mine = values[rank].clone()
        cast = mine.clone()
        dist.broadcast(cast, root)
        into = torch.zeros((world, *shape), dtype=dtype)
        dist.all_gather_into_tensor(into, mine)
        together = torch.zeros((world, *shape), dtype=dtype)
        with _coalescing_manager():
            dist.all_gather_into_tensor(together, mine)
        at_root = [torch.zeros(shape, dtype=dtype) for _ in range(world)] if rank == root else None
        dist.gather(mine, at_root, dst=root)
        part = torch.zeros(shape, dtype=dtype)
        dist.scatter(part, [value + 1 for value in values] if rank == root else None, src=root)
        return cast, into, together, at_root, part

    for rank, (cast, into, together, at_root, part) in enumerate(sim.run(world, fn, seed=seed)):
        assert same(cast, values[root])
        assert same(into, torch.stack(values))
        assert same(together, torch.stack(values))
        assert same(part, values[rank] + 1)
        if rank == root:
            assert all(same(left, right) for left, right in zip(at_root, values, strict=True))


@examples(times=2)
@given(world=worlds, seed=seeds, data_=st.data())
def test_uneven_exchanges(world, seed, data_):
    sizes = data_.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=world, max_size=world), min_size=world, max_size=world)
    )

    def fn(rank: int):
        give = sizes[rank]
        take = [sizes[source][rank] for source in range(world)]
        given_ = torch.arange(sum(give) * 2).view(-1, 2) + 100 * rank
        single = torch.zeros(sum(take), 2, dtype=torch.int64)
        dist.all_to_all_single(single, given_, take, give)
        listed = [torch.zeros(size, 2, dtype=torch.int64) for size in take]
        dist.all_to_all(listed, list(given_.split(give)))
        gathered = [torch.zeros(source + 1, dtype=torch.int64) for source in range(world)]
        dist.all_gather(gathered, torch.full((rank + 1,), rank))
        return given_, single, listed, gathered

    results = sim.run(world, fn, seed=seed)
    for rank, (_, single, listed, gathered) in enumerate(results):
        expected = [results[source][0].split(sizes[source])[rank] for source in range(world)]
        assert same(single, torch.cat(expected))
        assert all(same(left, right) for left, right in zip(listed, expected, strict=True))
        assert [tensor.tolist() for tensor in gathered] == [[source] * (source + 1) for source in range(world)]


def test_outputs_may_share_memory_with_inputs():
    def fn(rank: int):
        whole = torch.zeros(6)
        whole[2 * rank : 2 * rank + 2] = rank + 1.0
        dist.all_gather_into_tensor(whole, whole[2 * rank : 2 * rank + 2])
        gathered = whole.clone()
        dist.reduce_scatter_tensor(whole[2 * rank : 2 * rank + 2], whole)
        return gathered.tolist(), whole[2 * rank : 2 * rank + 2].tolist()

    for rank, (gathered, part) in enumerate(sim.run(3, fn)):
        assert gathered == [1, 1, 2, 2, 3, 3]
        assert part == [3.0 * (rank + 1)] * 2


def test_transposed_and_grad_requiring_tensors():
    def fn(rank: int):
        tensor = torch.arange(6.0).view(2, 3).t()
        dist.all_reduce(tensor)
        leaf = torch.ones(2, requires_grad=True)
        dist.all_reduce(leaf)
        with torch.inference_mode():
            frozen = torch.ones(2)
            dist.all_reduce(frozen)
        return tensor.tolist(), leaf.tolist(), leaf.is_leaf, frozen.tolist()

    for tensor, leaf, is_leaf, frozen in sim.run(2, fn):
        assert tensor == [[0, 6], [2, 8], [4, 10]]
        assert leaf == [2, 2]
        assert is_leaf
        assert frozen == [2, 2]


def test_complex_all_reduce_and_gather_tensor():
    def fn(rank: int):
        tensor = torch.ones(2, dtype=torch.complex64) * (1 + 1j * rank)
        dist.all_reduce(tensor)
        return tensor.tolist()

    assert sim.run(2, fn) == [[2 + 1j] * 2] * 2


@pytest.mark.parametrize("seed", range(5))
def test_send_recv_in_every_form(seed):
    def fn(rank: int):
        world = dist.get_world_size()
        left, right = (rank - 1) % world, (rank + 1) % world
        came = torch.zeros(2)
        ops = [dist.P2POp(dist.isend, torch.full((2,), float(rank)), right), dist.P2POp(dist.irecv, came, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        tagged = [torch.zeros(1), torch.zeros(1)]
        if rank == 0:
            works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (7, 8)]
            [work.wait() for work in works]
        if rank == 1:
            dist.irecv(tagged[0], 0, tag=8).wait() if seed < 0 else None
            works = [dist.irecv(tagged[1], 0, tag=8), dist.irecv(tagged[0], 0, tag=7)]
            [work.wait() for work in works]
        heard = []
        if rank == 0:
            for _ in range(world - 1):
                buffer = torch.zeros(1)
                heard.append((dist.recv(buffer), int(buffer)))
        else:
            dist.send(torch.tensor([10.0 * rank]), 0)
        own = torch.zeros(1)
        work = dist.isend(torch.ones(1), rank)
        dist.irecv(own, rank).wait()
        work.wait()
        return came.tolist(), [int(tensor) for tensor in tagged], sorted(heard), own.item()

    results = sim.run(4, fn, seed=seed)
    assert [result[0] for result in results] == [[3, 3], [0, 0], [1, 1], [2, 2]]
    assert results[1][1] == [7, 8]
    assert results[0][2] == [(1, 10), (2, 20), (3, 30)]
    assert all(result[3] == 1 for result in results)


def test_recv_from_anyone_depends_on_the_seed_only():
    def fn(rank: int):
        if rank:
            dist.send(torch.tensor([rank]), 0)
            return None
        buffer = torch.zeros(1, dtype=torch.int64)
        return [dist.recv(buffer) for _ in range(4)]

    orders = [tuple(sim.run(5, fn, seed=seed)[0]) for seed in range(12)]
    assert orders == [tuple(sim.run(5, fn, seed=seed)[0]) for seed in range(12)]
    assert len(set(orders)) > 3


def test_objects():
    def fn(rank: int):
        gathered = [None] * 3
        dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
        cast = [rank, "a"] if rank == 1 else [None, None]
        dist.broadcast_object_list(cast, src=1)
        at_root = [None] * 3 if rank == 2 else None
        dist.gather_object(rank, at_root, dst=2)
        part = [None]
        dist.scatter_object_list(part, ["a", "b", "c"] if rank == 0 else None, src=0)
        if rank == 0:
            dist.send_object_list([{"k": 1}], 1)
        if rank == 1:
            box = [None]
            dist.recv_object_list(box, 0)
            assert box == [{"k": 1}]
        return gathered, cast, at_root, part

    for rank, (gathered, cast, at_root, part) in enumerate(sim.run(3, fn)):
        assert gathered == [{"rank": r, "text": "x" * r} for r in range(3)]
        assert cast == [1, "a"]
        assert at_root == ([0, 1, 2] if rank == 2 else None)
        assert part == ["abc"[rank]]


def test_groups_and_meshes():
    def fn(rank: int):
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 3])]
        found = []
        for group in groups:
            tensor = torch.tensor([float(rank)])
            if rank in dist.get_process_group_ranks(group) if group != dist.GroupMember.NON_GROUP_MEMBER else False:
                dist.all_reduce(tensor, group=group)
                found.append((dist.get_rank(group), dist.get_world_size(group), tensor.item()))
        mine, _ = dist.new_subgroups(2)
        pair = torch.tensor([float(rank)])
        dist.all_reduce(pair, group=mine)
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        line = dist.init_device_mesh("cpu", (4,))
        sums = []
        for group in (mesh.get_group("data"), mesh.get_group("model"), line.get_group()):
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            sums.append(tensor.item())
        if hasattr(mesh, "_flatten"):
            tensor = torch.tensor([1.0])
            dist.all_reduce(tensor, group=mesh["data", "model"]._flatten("all").get_group())
            assert tensor.item() == 4
        return found, pair.item(), sums

    results = sim.run(4, fn, seed=3)
    assert results[0][0] == [(0, 2, 1), (0, 2, 3)]
    assert results[3][0] == [(1, 2, 5), (1, 2, 3)]
    assert [result[1] for result in results] == [1, 1, 5, 5]
    assert [result[2] for result in results] == [[2, 1, 6], [4, 1, 6], [2, 5, 6], [4, 5, 6]]


@needs_groups_of_any_backend
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functional_collectives():
    def fn(rank: int):
        group = dist.group.WORLD
        tensor = torch.tensor([float(rank), 1.0])
        x = torch.ones(2, requires_grad=True)
        funcol.all_gather_tensor_autograd(x * (rank + 1), 0, group).sum().backward()
        return (
            funcol.all_reduce(tensor, "sum", group).tolist(),
            funcol.all_gather_tensor(tensor, 0, group).tolist(),
            funcol.reduce_scatter_tensor(torch.arange(4.0) + rank, "sum", 0, group).tolist(),
            funcol.all_to_all_single(torch.arange(4.0) + 10 * rank, None, None, group).tolist(),
            funcol.broadcast(tensor, 1, group).tolist(),
            [t.tolist() for t in funcol.all_reduce_coalesced([tensor, tensor], "sum", group)],
            x.grad.tolist(),
        )

    zero, one = sim.run(2, fn)
    assert zero == ([1, 2], [0, 1, 1, 1], [1, 3], [0, 1, 10, 11], [1, 1], [[1, 2], [1, 2]], [2, 2])
    assert one == ([1, 2], [0, 1, 1, 1], [5, 7], [2, 3, 12, 13], [1, 1], [[1, 2], [1, 2]], [4, 4])


def test_manual_coalescing_with_a_device():
    def fn(rank: int):
        gathered = [torch.zeros(1), torch.zeros(1)]
        tensor = torch.ones(1) * rank
        with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.all_gather(gathered, torch.ones(1) * rank)
            dist.broadcast(tensor, 1)
        manager.wait()
        return [t.item() for t in gathered], tensor.item()

    assert sim.run(2, fn) == [([0, 1], 1)] * 2


def test_store_waits_pass_the_baton_on():
    def fn(rank: int):
        store = dist.distributed_c10d._get_default_store()
        if rank == 2:
            store.set("key", "value")
        count = store.add("count", 1)
        return store.get("key"), count

    for seed in range(3):
        results = sim.run(3, fn, seed=seed)
        assert [value for value, _ in results] == [b"value"] * 3
        assert sorted(count for _, count in results) == [1, 2, 3]
