"""Laws 2, 3 and 5 for the axes of a data-parallel group: MiCS, gathers and all-reduces of two stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn

import zoo.optim
from zoo import sim
from zoo.comm import Communicator
from zoo.zero import (
    GatheredParameters,
    ZeroOptimizer,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)

from .cases import Case, cases, train_reference, train_zero

Run = list[tuple[dict[str, torch.Tensor], list[Any]]]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def axes(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> tuple[Case, int, int]:
    """A case, the size of a shard group, and ranks of a node so that one of these two divides the other."""
    case = draw(cases(dtype=dtype))
    size = draw(st.sampled_from(divisors(case.world)))
    local = draw(st.sampled_from([d for d in divisors(case.world) if d % size == 0 or size % d == 0]))
    return case, size, local


def run(case: Case, stage: int, seed: int = 0, **options: Any) -> Run:
    return sim.run(case.world, lambda rank: train_zero(case, stage, rank, **options), seed=seed)


def same_bits(first: Run, second: Run) -> None:
    for (values, history), (others, other_history) in zip(first, second, strict=True):
        assert history == other_history
        for name, value in values.items():
            assert torch.equal(value, others[name]), name


def equals_one_process(case: Case, got: Run) -> None:
    # See test_placements for the tolerance.
    expected = train_reference(case)
    for parameters, _ in got:
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def check_mics(case: Case, size: int, local: int, two_stages: bool) -> None:
    options = {"mics_shard_size": size, "ranks_per_node": local}
    got = run(case, 3, **options, mics_hierarchical_params_gather=two_stages)
    equals_one_process(case, got)
    first = got[0][0]
    for values, _ in got:  # the replicas have not drifted apart by a bit
        assert all(torch.equal(values[name], first[name]) for name in first)
    if two_stages:
        same_bits(got, run(case, 3, **options))
    if size == case.world:
        same_bits(got, run(case, 3))


@pytest.mark.dear
@examples(times=1, quick=0.67)
@given(drawn=axes(dtype=torch.float64), two_stages=st.booleans())
@example(drawn=(Case(world=8, dtype=torch.float64), 4, 2), two_stages=True)
@example(drawn=(Case(world=6, dtype=torch.float64, accumulation="backwards", clip_norm=0.05), 2, 6), two_stages=False)
def test_mics_equals_one_process(drawn: tuple[Case, int, int], two_stages: bool) -> None:
    check_mics(*drawn, two_stages)


@pytest.mark.dear
@examples(times=1, quick=0.67)
@given(drawn=axes(), seed=st.integers(0, 50))
@example(drawn=(Case(world=6, accumulation="backwards", clip_norm=0.05), 2, 6), seed=0)
def test_shard_groups_have_the_same_bits_at_every_stage(drawn: tuple[Case, int, int], seed: int) -> None:
    case, size, local = drawn
    options = {"mics_shard_size": size, "ranks_per_node": local}
    third = run(case, 3, seed, **options)
    for stage in (1, 2):
        same_bits(run(case, stage, seed, **options), third)


@pytest.mark.dear
@given(drawn=axes(dtype=torch.float64), seed=st.integers(0, 50))
def test_an_all_reduce_of_two_stages_equals_one_process(drawn: tuple[Case, int, int], seed: int) -> None:
    case, _, local = drawn
    got = run(case, 0, seed, hierarchical_all_reduce=True, ranks_per_node=local)
    equals_one_process(case, got)
    if local == case.world:
        same_bits(got, run(case, 0))


@pytest.mark.dear
@given(drawn=axes(), seed=st.integers(0, 50), whole=st.booleans())
def test_a_gather_of_two_stages_has_the_bits_of_one(drawn: tuple[Case, int, int], seed: int, whole: bool) -> None:
    case, size, local = drawn
    options = {"mics_shard_size": -1 if whole else size, "ranks_per_node": local}
    same_bits(
        run(case, 3, seed, mics_hierarchical_params_gather=True, **options),
        run(case, 3, seed, **{**options, "ranks_per_node": None}),
    )


@pytest.mark.slow
@given(drawn=axes(), seed=st.integers(0, 50), mics=st.booleans(), data=st.data())
@example(drawn=(Case(world=4, recompute="reentrant", keep=0), 2, 1), seed=0, mics=False, data=None)
@example(drawn=(Case(world=4, shared_block=True, keep=0, tied=True), 2, 1), seed=0, mics=False, data=None)
def test_backward_gathers_the_same_bits_from_a_secondary_partition(
    drawn: tuple[Case, int, int], seed: int, mics: bool, data: st.DataObject | None
) -> None:
    case, size, _ = drawn
    options = {"mics_shard_size": size} if mics else {}
    sizes = divisors(size if mics else case.world)
    hpz = data.draw(st.sampled_from(sizes)) if data is not None else 2
    same_bits(run(case, 3, seed, zero_hpz_partition_size=hpz, **options), run(case, 3, seed, **options))


@pytest.mark.matrix
@pytest.mark.parametrize("keep", [0, 100, 10**6])
def test_a_secondary_partition_lives_from_forward_to_backward(keep: int) -> None:
    def fn(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).bfloat16()
        model[1].requires_grad_(False)
        optimizer = ZeroOptimizer(
            model, stage=3, lr=0.01, units=[nn.Linear], param_persistence_threshold=0, reduce_bucket_size=1,
            max_live_parameters=keep, zero_hpz_partition_size=2, prefetch_bucket_size=0,
        )  # fmt: skip
        x = torch.ones(2, 8, dtype=torch.bfloat16).requires_grad_()
        base = optimizer.memory()["parameters"]
        for _ in range(2):
            loss = model(x).sum()
            live = sum(b.num_bytes for b in optimizer.buckets if b.parameters.live)
            held = optimizer.memory()["parameters"] - base - live
            assert held == optimizer.forecast().secondary_bytes
            assert held == sum(b.num_bytes // 2 for b in optimizer.buckets if not b.parameters.live)
            loss.backward()
            assert optimizer.memory()["parameters"] == base
            optimizer.step()
            with torch.no_grad():
                model(x)  # no backward will come
            assert optimizer.memory()["parameters"] == base
            model(x)  # nor here, but nobody knows
            optimizer.zero_grad()
            optimizer.empty_partition_cache()
            assert optimizer.memory()["parameters"] == base

    sim.run(4, fn)


def test_after_an_update_between_forward_and_backward_no_secondary_partition_is_stale() -> None:
    def fn(rank: int, hpz: int) -> dict[str, torch.Tensor]:
        model = small(torch.float32)
        optimizer = ZeroOptimizer(
            model, stage=3, lr=0.1, param_persistence_threshold=0, max_live_parameters=0, zero_hpz_partition_size=hpz
        )
        model(data(rank, 0)).square().mean().backward()
        later = model(data(rank, 1)).square().mean()
        optimizer.step()
        optimizer.zero_grad()
        model(data(rank, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="older than the latest step"):
            later.backward()
        optimizer.zero_grad()
        model(data(rank, 3)).square().mean().backward()
        optimizer.step()
        return optimizer.consolidated_parameters()

    expected = sim.run(4, lambda rank: fn(rank, 1))
    for values in sim.run(4, lambda rank: fn(rank, 2)):
        assert all(torch.equal(value, expected[0][name]) for name, value in values.items())


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["Lamb", "Muon"])
@pytest.mark.parametrize("options", [{"stage": 3, "mics_shard_size": 2}, {"stage": 0, "hierarchical_all_reduce": True}])
def test_optimizers_of_whole_tensors_run_in_shard_groups(name: str, options: dict[str, Any]) -> None:
    def fn(rank: int, **options: Any) -> dict[str, torch.Tensor]:
        model = small(torch.float64)
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
        others: dict[str, Any] = {"params": [p for p in model.parameters() if p.requires_grad and p.ndim < 2]}
        if name == "Muon":
            others["use_muon"] = False
        optimizer = ZeroOptimizer(
            model, optimizer=getattr(zoo.optim, name), params=[{"params": matrices}, others], lr=0.01,
            param_persistence_threshold=0, ranks_per_node=2,
            reduce_bucket_size=20, **options,
        )  # fmt: skip
        for step in range(3):
            model(data(rank, step).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    expected = sim.run(4, lambda rank: fn(rank, stage=3))
    for values in sim.run(4, lambda rank: fn(rank, **options)):
        for key, value in values.items():
            torch.testing.assert_close(value, expected[0][key], rtol=1e-6, atol=1e-7)


# State ---------------------------------------------------------------------------------------------------------------


def small(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)
    model[0].bias.requires_grad_(False)
    return model


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


PLACEMENTS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (2, {}),
    (3, {}),
    (0, {"hierarchical_all_reduce": True, "ranks_per_node": 2}),
    (3, {"mics_shard_size": 1}),
    (3, {"mics_shard_size": 2}),
    (3, {"zero_hpz_partition_size": 2, "max_live_parameters": 0}),
    (3, {"mics_shard_size": 2, "mics_hierarchical_params_gather": True, "ranks_per_node": 1}),
]


@given(
    worlds=st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 6])),
    placements=st.tuples(st.sampled_from(PLACEMENTS), st.sampled_from(PLACEMENTS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_state_moves_between_axes(worlds: Any, placements: Any, dtype: torch.dtype) -> None:
    """Every element is owned once over all ranks, and any placement continues from any other's state."""

    def build(placement: Any) -> tuple[nn.Module, ZeroOptimizer]:
        model = small(dtype)
        stage, options = placement
        return model, ZeroOptimizer(model, stage=stage, lr=0.01, param_persistence_threshold=5, **options)

    def train(model: nn.Module, optimizer: ZeroOptimizer, rank: int, steps: range) -> None:
        for step in steps:
            model(data(rank % 2, step).to(dtype)).square().mean().backward()  # the same mean at any even world size
            optimizer.step()
            optimizer.zero_grad()

    def save(rank: int) -> Any:
        model, optimizer = build(placements[0])
        train(model, optimizer, rank, range(2))
        slices = [(s.name, s.role, s.start, s.tensor.float().clone()) for s in optimizer.state_slices()]
        scalars = optimizer.state_scalars()
        train(model, optimizer, rank, range(2, 4))
        return slices, scalars, optimizer.consolidated_parameters(torch.float32)

    saved = sim.run(worlds[0], save)
    state: dict[tuple[str, str], torch.Tensor] = {}
    for name, tensor in small(dtype).named_parameters():
        roles = ["parameter", "exp_avg", "exp_avg_sq"] if tensor.requires_grad else ["parameter"]
        for role in roles:
            whole = torch.full((tensor.numel(),), float("nan"))
            for slices, _, _ in saved:
                for found, its_role, start, part in slices:
                    if (found, its_role) == (name, role):
                        assert bool(whole[start : start + part.numel()].isnan().all()), "two ranks own one element"
                        whole[start : start + part.numel()] = part
            assert not bool(whole.isnan().any()), "nobody owns an element"
            state[name, role] = whole
    scalars = {k: v for _, s, _ in saved for k, v in s.items()}

    def load(rank: int) -> Any:
        model, optimizer = build(placements[1])
        optimizer.load_state(lambda name, role, start, length: state[name, role][start : start + length], scalars)
        train(model, optimizer, rank, range(2, 4))
        return optimizer.consolidated_parameters(torch.float32)

    # The ranks' sums are added in other orders; bf16 parameters may be rounded to the other neighbour by that.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for values in sim.run(worlds[1], load):
        for name, value in values.items():
            torch.testing.assert_close(value, saved[0][2][name], rtol=tolerance, atol=tolerance)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        {"mics_shard_size": 2},
        {"mics_shard_size": 2, "zero_quantized_weights": True, "zero_hpz_partition_size": 2},
        {"zero_hpz_partition_size": 2, "zero_quantized_nontrainable_weights": True},
        {"zero_quantized_weights": True, "max_live_parameters": 10**6},
    ],
    ids=str,
)
def test_values_can_be_read_and_changed_between_forward_and_backward(options: dict[str, Any]) -> None:
    def fn(rank: int) -> None:
        model = small(torch.float32)
        optimizer = ZeroOptimizer(
            model, stage=3, lr=0.01, param_persistence_threshold=0, **{"max_live_parameters": 0, **options}
        )
        loss = model(data(rank, 0)).square().mean()
        with GatheredParameters(model.parameters()):
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
        assert all(torch.equal(before[n], v) for n, v in optimizer.consolidated_parameters().items())
        with GatheredParameters([model[2].weight, model[0].bias], modifier_rank=3):
            if rank == 3:
                model[2].weight.data.add_(1.0)
                model[0].bias.data.fill_(0.25)
        assert torch.equal(safe_get_full_fp32_param(model[2].weight), before["2.weight"] + 1.0)
        assert torch.equal(optimizer.consolidated_parameters()["0.bias"], torch.full((6,), 0.25))
        seen: list[torch.Tensor] = []
        hook = model[2].register_forward_pre_hook(lambda m, a: seen.append(m.weight.detach().clone()))
        loss.backward()
        model(data(rank, 0))
        hook.remove()
        assert float((seen[0] - before["2.weight"] - 1.0).abs().max()) < 0.02
        optimizer.step()
        state = safe_get_full_optimizer_state(model[2].weight, "exp_avg")
        assert state is not None
        everyone = torch.empty(4 * state.numel())
        optimizer.comm.all_gather(everyone, state.flatten().contiguous()).wait()
        assert all(torch.equal(part, state.flatten()) for part in everyone.chunk(4))
        assert float(state.abs().sum()) > 0

    sim.run(4, fn)


# Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 3, "mics_shard_size": 3}, r"mics_shard_size=3 does not divide the 4 .*\[1, 2, 4\]"),
        ({"stage": 3, "mics_shard_size": 0}, "mics_shard_size=0; it is a number of ranks"),
        ({"stage": 0, "mics_shard_size": 2}, "mics_shard_size needs stage 1, 2 or 3"),
        ({"stage": 1, "mics_hierarchical_params_gather": True}, "mics_hierarchical_params_gather needs stage 3"),
        ({"stage": 0, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size needs stage 3"),
        ({"stage": 2, "zero_quantized_weights": True}, "zero_quantized_weights needs stage 3"),
        ({"stage": 2, "zero_quantized_gradients": True}, "zero_quantized_gradients needs stage 3"),
        ({"stage": 2, "zero_quantized_nontrainable_weights": True}, "nontrainable_weights needs stage 3"),
        ({"stage": 3, "hierarchical_all_reduce": True}, "all-reduce of stage 0; at stage 3"),
        ({"stage": 0, "hierarchical_all_reduce": True}, "which of the 4 ranks share a node.*LOCAL_WORLD_SIZE"),
        ({"stage": 3, "mics_hierarchical_params_gather": True}, "which of the 4 ranks share a node.*ranks_per_node="),
        (
            {"stage": 3, "mics_hierarchical_params_gather": True, "ranks_per_node": 3},
            r"equally many on each; this group of 4 ranks is on the nodes \[0, 0, 0, 1\]",
        ),
        ({"stage": 3, "zero_hpz_partition_size": 3}, "zero_hpz_partition_size=3 does not divide the 4 ranks"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], words: str) -> None:
    def fn(rank: int) -> None:
        with pytest.raises(ValueError, match=words):
            ZeroOptimizer(small(torch.float32), lr=0.01, **options)

    sim.run(4, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_secondary_partition_of_more_ranks_than_there_are_is_over_all_of_them(ranks: int) -> None:
    case = replace(Case(), world=ranks)
    same_bits(run(case, 3), run(case, 3, zero_hpz_partition_size=8))


def test_a_mesh_and_torchrun_say_which_ranks_share_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    case = replace(Case(), world=4)
    expected = run(case, 0, hierarchical_all_reduce=True, ranks_per_node=2)

    def on_a_mesh(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
        return train_zero(case, 0, rank, hierarchical_all_reduce=True, group=mesh)

    same_bits(expected, sim.run(4, on_a_mesh))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    same_bits(expected, run(case, 0, hierarchical_all_reduce=True))


@pytest.mark.parametrize("quantised", [False, True])
def test_the_second_stage_of_a_gather_and_of_a_reduction_begins_a_unit_early(
    monkeypatch: pytest.MonkeyPatch, quantised: bool
) -> None:
    """Within the node a layer is gathered before the layer in front of it runs: ``collectives.routes.advance``."""
    events: dict[int, list[str]] = {rank: [] for rank in range(4)}

    def watched(name: str) -> Any:
        plain = getattr(Communicator, name)

        def collective(self: Communicator, *args: Any, label: str = "", **more: Any) -> Any:
            events[dist.get_rank()].append(label)
            return plain(self, *args, label=label, **more)

        return collective

    for name in ("all_gather", "all_to_all"):
        monkeypatch.setattr(Communicator, name, watched(name))

    def fn(rank: int) -> list[str]:
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(5)))
        optimizer = ZeroOptimizer(
            model, stage=3, lr=0.1, units=[nn.Linear], param_persistence_threshold=0, reduce_bucket_size=1,
            max_live_parameters=0, ranks_per_node=2, mics_hierarchical_params_gather=True,
            zero_quantized_weights=quantised, zero_quantized_gradients=True,
        )  # fmt: skip
        for number, layer in enumerate(model):
            layer.register_forward_pre_hook(lambda *_, n=number: events[rank].append(f"run {n}"))
            layer.register_full_backward_pre_hook(lambda *_, n=number: events[rank].append(f"back {n}"))
        for _ in range(2):  # the first records the order
            events[rank].clear()
            model(torch.ones(2, 16, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return events[rank]

    for seen in sim.run(4, fn):
        back = seen.index("back 4")

        def first(start: str, end: str, since: int = 0, seen: list[str] = seen) -> int:
            return next(i for i in range(since, len(seen)) if seen[i].startswith(start) and seen[i].endswith(end))

        gathered = " as int8, within a node" if quantised else ", within a node"
        for layer in (2, 3, 4):
            assert first(f"parameters of '{layer}'", gathered) < seen.index(f"run {layer - 1}")
        for layer in (
            2,
            1,
            0,
        ):  # what two layers further on is ready to be reduced is reduced while the one between runs
            assert first(f"parameters of '{layer}'", gathered, back) < first(f"gradients of '{layer + 2}'", "int4")
        for layer in (4, 3, 2):
            assert first(f"gradients of '{layer}'", "between nodes as int4") < first(
                f"gradients of '{layer - 2}'", "int4"
            )
