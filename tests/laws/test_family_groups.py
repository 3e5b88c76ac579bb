"""Groups within the group for parameters with axes of their own: who is in them, what is sent, what is rounded."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests.laws.test_families import Case, Experts, build, cases, pick, states, tokens, train, whole
from tests.profiles import examples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.comm import Communicator
from zoo.layout import declare_partial, declare_split
from zoo.shard.placement.families import make_families, ranks_of
from zoo.zero import ZeroConfig, ZeroOptimizer, safe_get_full_fp32_param

Ranks = tuple[int, ...]


# Who is in them ------------------------------------------------------------------------------------------------------


def axes_of(
    sizes: dict[str, int], data_axes: tuple[str, ...], split: tuple[str, ...], partial: tuple[str, ...],
    options: dict[str, Any],
) -> list[dict[str, Ranks]]:  # fmt: skip
    """The groups of one family on each rank, and the nodes of all its ranks."""

    def fn(rank: int) -> dict[str, Ranks]:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        config = ZeroConfig(**{"stage": 3, **options})
        ranks = ranks_of(None, mesh, data_axes, (), check=False, nodes=config.ranks_per_node)
        parameter = nn.Parameter(torch.zeros(4))
        declare_split(parameter, split)
        declare_partial(parameter, partial)
        families = make_families(ranks, [("p", parameter)], config)
        found = families[tuple(sorted([*split, *(f"+{axis}" for axis in partial)]))]
        groups = {name: getattr(found, name) for name in ("shard", "replicas", "local", "across", "secondary")}
        nodes = {"nodes": found.world.nodes or ()}
        return nodes | {name: tuple(comm.ranks) for name, comm in groups.items() if comm is not None}

    world = 1
    for size in sizes.values():
        world *= size
    return sim.run(world, fn)


def test_a_shard_group_is_what_the_ranks_of_a_part_have_of_the_whole_one() -> None:
    # Data-parallel ranks 0 to 7; experts alternate, and a shard group has four ranks.
    found = axes_of({"data": 4, "expert": 2}, ("data", "expert"), ("expert",), (), {"mics_shard_size": 4})
    assert found[0]["shard"] == found[2]["shard"] == (0, 2)
    assert found[5]["shard"] == (5, 7)
    assert found[0]["replicas"] == found[4]["replicas"] == (0, 4)
    assert found[3]["replicas"] == (3, 7)


def test_where_the_axis_of_experts_lies_outside_a_shard_group_is_one_of_theirs() -> None:
    found = axes_of({"expert": 2, "data": 4}, ("expert", "data"), ("expert",), (), {"mics_shard_size": 4})
    assert found[1]["shard"] == (0, 1, 2, 3)
    assert found[6]["shard"] == (4, 5, 6, 7)
    assert found[6]["replicas"] == (6,)


def test_a_shard_group_with_one_rank_of_each_part_splits_none() -> None:
    found = axes_of({"data": 2, "expert": 2}, ("data", "expert"), ("expert",), (), {"mics_shard_size": 2})
    assert [groups["shard"] for groups in found] == [(0,), (1,), (2,), (3,)]
    assert [groups["replicas"] for groups in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_ranks_with_summands_of_one_gradient_split_it_too() -> None:
    sizes, split, partial = {"data": 4, "tensor": 2}, (), ("tensor",)
    found = axes_of(sizes, ("data",), split, partial, {"mics_shard_size": 2})
    assert found[0]["shard"] == found[3]["shard"] == (0, 1, 2, 3)
    assert found[5]["shard"] == (4, 5, 6, 7)
    assert found[5]["replicas"] == (1, 5)
    all_of_them = axes_of(sizes, ("data",), split, partial, {"mics_shard_size": 4})
    assert {groups["shard"] for groups in all_of_them} == {tuple(range(8))}


@pytest.mark.parametrize(("order", "copy"), [(("data", "tensor"), (0, 1, 2, 3)), (("tensor", "data"), (0, 1))])
def test_what_is_kept_for_backward_stays_on_a_node(order: tuple[str, ...], copy: Ranks) -> None:
    """Ranks of the tensor axis are neighbours in the first mesh, and on other nodes in the second."""
    sizes = {axis: {"data": 4, "tensor": 2}[axis] for axis in order}
    options = {"zero_hpz_partition_size": 2, "ranks_per_node": 4}
    found = axes_of(sizes, ("data",), (), ("tensor",), options)
    assert found[0]["secondary"] == copy
    # hpZ without knowledge of nodes: all that have a share of the same ranks of data.
    blind = axes_of(sizes, ("data",), (), ("tensor",), {"zero_hpz_partition_size": 2})
    assert blind[0]["secondary"] == ((0, 1, 2, 3) if order[0] == "data" else (0, 1, 4, 5))


def test_hpz_keeps_what_the_ranks_of_a_part_have_of_a_partition() -> None:
    found = axes_of({"data": 4, "expert": 2}, ("data", "expert"), ("expert",), (), {"zero_hpz_partition_size": 4})
    assert found[0]["secondary"] == (0, 2)
    assert found[7]["secondary"] == (5, 7)
    assert found[7]["shard"] == (1, 3, 5, 7)
    alone = axes_of({"data": 2, "expert": 2}, ("data", "expert"), ("expert",), (), {"zero_hpz_partition_size": 2})
    assert [groups["secondary"] for groups in alone] == [(0,), (1,), (2,), (3,)]


def test_ranks_of_a_node_follow_one_another() -> None:
    options = {"zero_quantized_gradients": True, "ranks_per_node": 4}
    found = axes_of({"data": 4, "expert": 2}, ("data", "expert"), ("expert",), (), options)
    assert found[3]["local"] == (1, 3)
    assert found[3]["across"] == (3, 7)
    assert found[3]["nodes"] == (0, 0, 1, 1)
    both = axes_of({"tensor": 2, "data": 4}, ("data",), (), ("tensor",), options)
    assert both[5]["shard"] == tuple(range(8))
    assert both[5]["local"] == (4, 5, 6, 7)
    assert both[5]["across"] == (1, 5)


def test_the_ranks_of_a_node_reduce_what_has_parts_too() -> None:
    options = {"stage": 0, "hierarchical_all_reduce": True, "ranks_per_node": 4}
    found = axes_of({"data": 4, "expert": 2}, ("data", "expert"), ("expert",), (), options)
    assert found[2]["shard"] == (0, 2)
    assert found[2]["replicas"] == (2, 6)


# What is sent --------------------------------------------------------------------------------------------------------


@pytest.mark.dear
@given(case=cases())
def test_every_byte_is_forecast_with_where_it_goes(case: Case) -> None:
    def fn(rank: int) -> None:
        model, optimizer, replica = build(case, rank)
        train(model, optimizer, case, replica, range(1))
        expected, log = optimizer.forecast(), optimizer.comm.log
        log.reset()
        train(model, optimizer, case, replica, range(1, 2))
        for field in ("wire_bytes", "intra_bytes", "inter_bytes"):
            sent = {op: getattr(row, field) for op, row in log.ops.items() if getattr(row, field)}
            assert sent == getattr(expected, field), field
        memory = optimizer.memory()
        assert memory["parameters"] == expected.parameters_bytes

    sim.run(case.world, fn, seed=case.seed)


@pytest.mark.dear
@examples(times=0.5, quick=0.34)
@given(case=cases(stages=(3,)), size=st.sampled_from([2, 4]))
@example(case=Case(data=4, options=(("max_live_parameters", 0),)), size=4)
def test_backward_gathers_the_same_bits_from_a_secondary_partition(case: Case, size: int) -> None:
    assume(case.expert != 3 and not case.data * case.expert % size)

    def fn(rank: int, hpz: int) -> Any:
        model, optimizer, replica = build(case, rank, mics_shard_size=-1, zero_hpz_partition_size=hpz)
        train(model, optimizer, case, replica, range(2))
        return states(optimizer), optimizer.forecast().secondary_bytes

    kept = sim.run(case.world, lambda rank: fn(rank, size), seed=case.seed)
    plain = sim.run(case.world, lambda rank: fn(rank, 1), seed=case.seed)
    one, other = (whole([found for found, _ in runs]) for runs in (kept, plain))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert all(not secondary for _, secondary in plain)
    if ("max_live_parameters", 0) in case.options and size < case.data * case.expert:
        assert all(secondary for _, secondary in kept)


# What is rounded -----------------------------------------------------------------------------------------------------


def axes_apart(name: str) -> tuple[str, ...]:
    """Along these a parameter of the model has other values, or the same ones twice."""
    return ("expert", "tensor") if "experts" in name else ("tensor",)


@pytest.mark.dear
@given(case=cases(stages=(3,)), bits=st.sampled_from([4, 8]), local=st.sampled_from([1, 2, 4, 8]))
@example(case=Case(data=4), bits=8, local=4)
@example(case=Case(data=4, options=(("mics_shard_size", 4),)), bits=8, local=2)
@example(case=Case(data=2, tensor=2, order=("tensor", "expert", "data")), bits=8, local=2)
def test_quantised_gradients_arrive_within_the_bound(case: Case, bits: int, local: int) -> None:
    """|g' - 1/N Σ_r x_r| <= h/(2Q) · 1/N Σ_r A_r over the ranks of a parameter's world, N that of all losses."""
    assume(case.expert != 3 and not case.world % local)
    case = replace(case, threshold=0, clip_norm=0.0)
    options = {
        "ranks_per_node": local, "zero_quantized_gradients": True, "quantized_gradients_bits": bits,
        "momentum": 0.0, "lr": 1.0,
    }  # fmt: skip

    def fn(rank: int) -> Any:
        model, optimizer, replica = build(case, rank, torch.float32, **options)
        before = {n: safe_get_full_fp32_param(p).double() for n, p in model.named_parameters()}
        with optimizer.no_sync():
            model(tokens(case, replica, 0).float()).square().mean().backward()
        mine = {n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None}
        assert mine.keys() == before.keys()
        optimizer.step()
        after = {n: safe_get_full_fp32_param(p).double() for n, p in model.named_parameters()}
        mesh = init_device_mesh("cpu", tuple(getattr(case, axis) for axis in case.order), mesh_dim_names=case.order)
        place = dict(zip(case.order, mesh.get_coordinate(), strict=True))  # type: ignore[arg-type]
        return place, mine, {n: before[n] - after[n] for n in before}, before

    ranks = sim.run(case.world, fn, seed=case.seed)
    num_losses, steps = case.data * case.expert, 127 if bits == 8 else 7
    for place, mine, arrived, values in ranks:
        for name in mine:
            apart = axes_apart(name)
            world = [given for there, given, _, _ in ranks if all(there[axis] == place[axis] for axis in apart)]
            exact = torch.stack([given[name] for given in world]).sum(0) / num_losses
            # A group of elements may have those of other parameters that travel with this one.
            largest = [max(float(g.abs().max()) for n, g in given.items() if axes_apart(n) == apart) for given in world]
            bound = 2 / (2 * steps) * sum(largest) / num_losses * (1 + 1e-4) + 1e-6 * (1 + values[name].abs().max())
            assert float((arrived[name] - exact).abs().max()) <= bound, name


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "other"),
    [
        (Case(data=2, expert=2), Case(data=2, expert=2)),
        (Case(data=2, expert=2), Case(data=4, expert=1, per_rank=2)),
        (Case(data=4, expert=1, per_rank=2), Case(data=2, expert=2)),
        (Case(data=2, expert=2, tensor=2), Case(data=4, expert=2)),
        (Case(data=4, expert=2), Case(data=2, expert=2, tensor=2, options=(("mics_shard_size", 4),))),
    ],
)
def test_errors_that_are_fed_back_move_between_meshes(case: Case, other: Case) -> None:
    """owed + 1/N Σ_r e_r of each element stays, whoever had parts of it on how many ranks."""
    options = {
        "ranks_per_node": 2, "zero_quantized_gradients": True, "quantized_gradients_feedback": True, "momentum": 0.0,
    }  # fmt: skip

    def save(rank: int) -> Any:
        model, optimizer, replica = build(case, rank, torch.float32, **options)
        for step in range(2):
            model(tokens(case, replica, step).float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found, kept, errors = states(optimizer), optimizer.state_dict(), errors_of(optimizer)
        optimizer.load_state_dict(kept)
        assert same(found, states(optimizer))
        assert all(torch.equal(a, b) for a, b in zip(errors, errors_of(optimizer), strict=True))
        assert errors
        return found, optimizer.state_scalars()

    saved = sim.run(case.world, save)
    state = whole([found for found, _ in saved])
    scalars = {key: value for _, found in saved for key, value in found.items()}

    def load(rank: int) -> Any:
        model, optimizer, replica = build(other, rank, torch.float32, **options)
        optimizer.load_state(lambda name, role, start, length: pick(state[name, role], start, length), scalars)
        found, kept = states(optimizer), optimizer.state_dict()
        optimizer.load_state_dict(kept)
        assert same(found, states(optimizer))
        model(tokens(other, replica, 5).float()).square().mean().backward()
        optimizer.step()
        return found, [safe_get_full_fp32_param(p) for p in (model.first.weight, model.pair.bias)]

    loaded = sim.run(other.world, load)
    assert all(torch.equal(a, b) for _, values in loaded for a, b in zip(values, loaded[0][1], strict=True))
    again = whole([found for found, _ in loaded])
    names = {name for name, role in state if role == "parameter"}
    assert any(role.startswith("feedback.") for _, role in state)
    for name in names:
        was, now = total(state, name, case.data * case.expert), total(again, name, other.data * other.expert)
        torch.testing.assert_close(now, was, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
        assert float(was.abs().max()) > 0, name
    if case == other:
        assert again.keys() == state.keys()


def errors_of(optimizer: ZeroOptimizer) -> list[torch.Tensor]:
    return [feedback.error.clone() for feedback in optimizer._feedback if feedback.error is not None]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(a[:4] == b[:4] and torch.equal(a[4], b[4]) for a, b in itertools.zip_longest(one, other))


def total(state: dict[tuple[str, str], torch.Tensor], name: str, num_losses: int) -> torch.Tensor:
    errors = [value for (which, role), value in state.items() if which == name and role.startswith("feedback.")]
    owed = state.get((name, "owed"), torch.zeros_like(state[name, "parameter"]))
    return owed + sum(errors, torch.zeros_like(owed)) / num_losses


# Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        (
            {"data": 3, "expert": 2}, {"mics_shard_size": 3},
            r"mics_shard_size=3 makes groups of which 1 or 2 ranks have the same part of 'moe.experts.0.weight'.*"
            r"mics_shard_size may be 1, 2, 6\.",
        ),
        (
            {"expert": 2, "data": 3}, {"zero_hpz_partition_size": 2},
            r"zero_hpz_partition_size=2 makes groups of which 1 or 2 .*zero_hpz_partition_size may be 1, 3, 6\.",
        ),
        (
            {"expert": 2, "data": 3}, {"zero_quantized_gradients": True, "ranks_per_node": 2},
            r"ranks_per_node=2 makes groups of which 1 or 2 ranks .*ranks_per_node may be 1, 3, 6\.",
        ),
        (
            {"expert": 2, "data": 3}, {"stage": 0, "hierarchical_all_reduce": True, "ranks_per_node": 2},
            r"ranks_per_node=2 makes groups of which 1 or 2 ranks .*ranks_per_node may be 1, 3, 6\.",
        ),
        (
            {"expert": 2, "data": 3}, {"zero_quantized_gradients": True},
            r"zero_quantized_gradients needs to know which of the 6 ranks share a node",
        ),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_on_all_ranks_with_those_that_do(
    sizes: dict[str, int], options: dict[str, Any], words: str
) -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = nn.Sequential()
        model.add_module("moe", Experts(2, Communicator.of_axes(mesh, ["expert"])))
        with pytest.raises(ValueError, match=words):
            ZeroOptimizer(model, lr=0.1, mesh=mesh, data_axes=tuple(sizes), **{"stage": 3, **options})
        assert type(next(model.parameters())) is nn.Parameter

    sim.run(6, fn)


def test_a_table_of_which_ranks_have_parts_travels_whole_which_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def fn(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = nn.Sequential(nn.Embedding(4, 2), nn.Embedding(6, 2))
        place = mesh.get_local_rank("tensor")
        declare_split(model[1].weight, ["tensor"], shape=(12, 2), offsets=(6 * place, 0))
        optimizer = ZeroOptimizer(model, stage=2, lr=0.1, mesh=mesh, data_axes=("data",), sparse_gradients=True)
        return [bucket.spec.row for bucket in optimizer.buckets]

    with caplog.at_level(logging.INFO, logger="zoo.zero"):
        assert sim.run(4, fn) == [[2, 0]] * 4
    said = [r.message for r in caplog.records if "travels whole" in r.message]
    assert set(said) == {"the gradient of '1.weight' travels whole: ranks have parts of this table"}
