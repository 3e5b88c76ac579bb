"""One rank for each role is all ranks, exactly: what the ranks that run compute, begin and wait for, and its time.

For stages of ZeRO with groups within nodes, pipelines with data-parallel ranks, experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from tests.pipe.test_engine import batches, engine_of
from tests.pipe.test_training import Case as Pipeline
from tests.profiles import deep_example, examples

from zoo import sim
from zoo.cost import cost_on, read_hardware
from zoo.cost.events import Compute, Program, Start, Timeline, simulate_events
from zoo.plan import Actions
from zoo.profiling import WorkCounter
from zoo.zero import ZeroOptimizer

from . import test_families as families
from .cases import Case, accumulate, cases, make_model

HARDWARE = replace(read_hardware("a100-80"), ranks_per_node=8)


def told(program: Program) -> list[Any]:
    """A program without the numbers by which one run names its communications."""
    keys: dict[Any, int] = {}
    found: list[Any] = []
    for item in program:
        if isinstance(item, Start):
            found.append(item._replace(key=keys.setdefault(item.key, len(keys))))
        elif isinstance(item, Compute):
            found.append(item)
        else:
            found.append(tuple(keys[key] for key in item.keys))
    return found


def both(
    world: int, fn: Callable[[int], Any], role_of: Callable[[int], Any], seed: int = 0
) -> tuple[Timeline, Timeline]:  # fmt: skip
    """All ranks, and one for each role: the programs of those are equal, and so is their time."""
    whole, some = sim.Programs(), sim.Programs()
    results = sim.run(world, fn, seed=seed, programs=whole, transport="native")
    of_roles = sim.run(world, fn, seed=seed + 1, programs=some, transport="native", role_of=role_of)
    assert len(of_roles) == len(some.ranks) == len({role_of(rank) for rank in range(world)})
    for place, rank in enumerate(some.ranks):
        assert of_roles[place] == results[rank]
        assert told(some.programs()[place]) == told(whole.programs()[rank])
    cost = cost_on(HARDWARE)
    all_ranks = simulate_events(whole.programs(), cost)
    found = simulate_events(some.programs(), cost, ranks=some.ranks)
    assert found.ends_s == tuple(all_ranks.ends_s[rank] for rank in some.ranks)
    assert found.exposed_s == tuple(all_ranks.exposed_s[rank] for rank in some.ranks)
    assert found.computed == tuple(all_ranks.computed[rank] for rank in some.ranks)
    assert found.makespan_s == all_ranks.makespan_s
    assert found.critical_s() == pytest.approx(all_ranks.critical_s())
    assert [s for s in all_ranks.spans if s.rank in some.ranks] == list(found.spans)
    return all_ranks, found


def step_of(rank: int, run: Callable[[], None], sharded: Any) -> Actions:
    """A step whose computations last as long as their FLOPs; what the runtime did."""
    with WorkCounter() as work, sharded.record(work) as actions:
        run()
    return actions


@pytest.mark.dear
@examples(times=0.5, quick=1)
@given(
    case=cases(max_world=1), world=st.sampled_from([2, 8, 16]), stage=st.integers(0, 3), hpz=st.booleans(),
    seed=st.integers(0, 20),
)  # fmt: skip
@example(case=Case(num_blocks=2, keep=0), world=16, stage=3, hpz=True, seed=1)
@deep_example(case=Case(), world=64, stage=3, hpz=False, seed=2)
def test_one_rank_of_a_job_of_equal_ranks(case: Case, world: int, stage: int, hpz: bool, seed: int) -> None:
    case = replace(case, world=world, silent_ranks=())
    local = min(world, 8)
    options = {"zero_hpz_partition_size": local, "ranks_per_node": local} if hpz and stage == 3 else {}

    def fn(rank: int) -> Actions:
        model = make_model(case)
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=0.1, reduce_bucket_size=case.bucket_size,
            param_persistence_threshold=case.threshold, prefetch_bucket_size=case.prefetch,
            max_live_parameters=case.keep, overlap_comm=case.overlap, clip_norm=case.clip_norm, **options,
        )  # fmt: skip

        def run() -> None:
            sim.compute(1e-5, "work")
            accumulate(model, optimizer, case, 0, 0)
            sim.compute(1e-5, "more")
            optimizer.step()

        return step_of(rank, run, optimizer.sharded)

    both(world, fn, lambda rank: 0, seed)


@pytest.mark.dear
@examples(times=0.2, quick=1)
@given(
    pipe=st.integers(2, 4), data=st.sampled_from([1, 2, 8]), stage=st.integers(0, 3), tied=st.booleans(),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"]),
)  # fmt: skip
@example(pipe=2, data=2, stage=3, tied=True, schedule="1f1b")
@deep_example(pipe=2, data=32, stage=3, tied=False, schedule="1f1b")
def test_one_rank_of_each_stage_of_a_pipeline(pipe: int, data: int, stage: int, tied: bool, schedule: str) -> None:
    case = Pipeline(pipe=pipe, data=data, stage=stage, tied=tied, schedule=schedule, num_micro=4)

    def fn(rank: int) -> Actions:
        engine = engine_of(case)
        given = batches(replace(case, data=1), engine)  # all pipelines have the data of the first

        def run() -> None:
            sim.compute(1e-5 * (1 + rank // data), "work")
            engine.train_batch(given)

        found = step_of(rank, run, engine.sharded)
        engine.destroy()
        return found

    both(pipe * data, fn, lambda rank: rank // data)


@pytest.mark.dear
@examples(times=0.3, quick=1)
@given(
    data=st.sampled_from([2, 4, 16]), expert=st.integers(1, 2), tensor=st.integers(1, 2), stage=st.integers(0, 3),
    per_rank=st.integers(1, 2), tier=st.sampled_from(families.TIERS),
)  # fmt: skip
@example(data=4, expert=2, tensor=2, stage=3, per_rank=1, tier="cpu")
@deep_example(data=16, expert=2, tensor=2, stage=3, per_rank=2, tier="nvme")
def test_one_rank_of_each_expert_and_tensor_part(
    data: int, expert: int, tensor: int, stage: int, per_rank: int, tier: str, tmp_path_factory: Any
) -> None:
    options: tuple[tuple[str, Any], ...] = ()
    if stage:
        folder = tmp_path_factory.mktemp("nvme")
        options = (("offload_optimizer", {"device": tier, "nvme_path": folder}),)
    case = families.Case(data=data, expert=expert, tensor=tensor, stage=stage, per_rank=per_rank, options=options)

    def fn(rank: int) -> Actions:
        model, optimizer, _ = families.build(case, rank)

        def run() -> None:
            sim.compute(1e-5, "work")
            model(families.tokens(case, 0, 0)).square().mean().backward()
            optimizer.step()

        return step_of(rank, run, optimizer.sharded)

    both(case.world, fn, lambda rank: rank % (expert * tensor))


@given(
    world=st.integers(1, 12), num_roles=st.integers(1, 4), seed=st.integers(0, 9),
    op=st.sampled_from(["SUM", "AVG", "MAX", "MIN", "PRODUCT", "BOR", "BXOR", "BAND"]),
)  # fmt: skip
def test_collectives_have_the_values_of_ranks_that_are_alike(world: int, num_roles: int, seed: int, op: str) -> None:
    """Integers: a sum of equal numbers is the number of them times one, whatever the order."""
    num = min(num_roles, world)

    def fn(rank: int) -> list[Any]:
        role, kind = rank % num, getattr(dist.ReduceOp, op)
        mine = torch.arange(world, dtype=torch.int64) + 10 * role
        found = [mine.clone(), torch.empty(1, dtype=torch.int64), torch.empty(world * world, dtype=torch.int64)]
        dist.all_reduce(found[0], op=kind)
        dist.reduce_scatter_tensor(found[1], mine.clone(), op=kind)
        dist.all_gather_into_tensor(found[2], mine)
        listed = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(listed, mine)
        parts = [torch.empty(1, dtype=torch.int64) for _ in range(world)]
        dist.all_to_all(parts, list(mine.clone().split(1)))
        swapped = torch.empty_like(mine)
        dist.all_to_all_single(swapped, mine)
        scattered = torch.empty(1, dtype=torch.int64)
        dist.reduce_scatter(scattered, list(mine.clone().split(1)), op=kind)
        copied = mine.clone()
        dist.broadcast(copied, world - 1)
        dist.barrier()
        return [t.tolist() for t in (*found, *listed, *parts, swapped, scattered, copied)]

    expected = sim.run(world, fn, seed=seed)
    found = sim.run(world, fn, seed=seed, role_of=lambda rank: rank % num)
    assert found == expected[:num]


def test_a_hundred_thousand_ranks_take_the_threads_of_their_roles() -> None:
    def fn(rank: int) -> float:
        x = torch.ones(2)
        dist.all_reduce(x)
        return float(x[0])

    programs = sim.Programs()
    assert sim.run(100_000, fn, role_of=lambda rank: rank >= 60_000, programs=programs) == [100_000.0] * 2
    assert programs.ranks == (0, 60_000)
    found = simulate_events(programs.programs(), cost_on(HARDWARE), ranks=programs.ranks)
    assert found.makespan_s > 0


def test_what_needs_a_rank_that_does_not_run_is_said() -> None:
    def sends(rank: int) -> None:
        dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)

    with pytest.raises(sim.RankError, match=r"send .* and rank 1 does not run: rank 0 has its role. Run all ranks"):
        sim.run(2, sends, role_of=lambda rank: 0)

    def scatters(rank: int) -> None:
        dist.scatter(torch.ones(1), [torch.ones(1)] * 2 if rank == 1 else None, src=1)

    with pytest.raises(sim.RankError, match="the root does not run; choose roles whose first ranks are the roots"):
        sim.run(2, scatters, role_of=lambda rank: 0)

    def halves(rank: int) -> None:
        for ranks in ([0, 3], [1, 2]):
            dist.new_group(ranks)

    with pytest.raises(sim.RankError, match=r"rank 3 does not run; rank 1, which has its role, is not in the group"):
        sim.run(4, halves, role_of=lambda rank: min(rank, 1))
    with pytest.raises(ValueError, match=r'role_of goes with transport="native", not with "pairwise"'):
        sim.run(2, halves, role_of=lambda rank: 0, transport="pairwise")
    with pytest.raises(ValueError, match=r"names rank 1, in whose place another rank of its role runs"):
        sim.run(2, halves, role_of=lambda rank: 0, faults=[sim.Crash(rank=1, at=0)], transport="native")


def test_a_job_of_one_role_that_differs_waits_and_says_for_whom() -> None:
    def fn(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(sim.DeadlockError, match=r"(?s)waiting for rank 2\n.*rank 2 had returned already"):
        sim.run(4, fn, role_of=lambda rank: rank // 2)
