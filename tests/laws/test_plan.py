"""One list: what is planned of a step is what is recorded of it, action by action, and what the simulator sees.

For stages and numbers of backwards, nested units and tied layers; for windows of schedules and pipelines; for tiers,
experts and tensor-parallel layers, groups within nodes, and updates in backward.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.pipe.test_engine import batches, engine_of
from tests.pipe.test_training import Case as Pipeline
from tests.pipe.test_training import cases as pipelines
from tests.profiles import examples
from tests.shard.runtime import micro_batches
from tests.zero.test_window_forecast import drives_of

from zoo import sim
from zoo.cost import program_of
from zoo.cost.events import Compute, Program, Start, simulate_events
from zoo.plan import Actions, Collective, Kind
from zoo.profiling import WorkCounter
from zoo.shard import Drive, ShardedModel
from zoo.zero import ZeroOptimizer

from . import test_families as families
from .cases import Case, accumulate, cases, make_model, num_micro
from .test_actions import OPS


def check(actions: Actions, planned: Actions) -> None:
    for number, (did, said) in enumerate(zip(actions, planned, strict=False)):
        assert did == said, f"action {number}: {did} / {said}"
    assert len(actions) == len(planned)


def follow(
    sharded: ShardedModel, plan: Callable[[Actions | None], Actions], run: Callable[[int], None]
) -> Actions:  # fmt: skip
    """Three steps, of which the last two are planned: what goes between ranks in the second, computations too in the
    third, which are those of the second. The plan of the third."""
    like = None
    for step in range(3):
        planned = plan(like if step == 2 else None)
        sim.compute(1e-9, f"step {step}")
        with WorkCounter() as work, sharded.record(work) as actions:
            run(step)
        sim.compute(1e-9, "over")
        if step == 2:
            check(actions, planned)
        elif step == 1:  # from the second pass on in a known order
            check(without_work(actions), planned)
        like = actions
    return planned


def without_work(actions: Actions) -> Actions:
    return Actions(action for action in actions if action.kind is not Kind.COMPUTE)


def started(program: Program) -> list[Collective]:
    """What a rank begins under the simulator, groups of one rank left out."""
    return [collective(item) for item in program if isinstance(item, Start) and len(item.members) > 1]


def collective(item: Start) -> Collective:
    op, size = OPS.get(item.op, item.op), len(item.members)
    return Collective(op=op, size=size, num_bytes=round(item.num_bytes) * (size if op == "all_gather" else 1))


def third_step(program: Program) -> list[Start]:
    """What a rank begins in the step that was planned."""
    names = [item.name if isinstance(item, Compute) else "" for item in program]
    begin = names.index("step 2")
    return [
        item for item in program[begin : names.index("over", begin)]
        if isinstance(item, Start) and len(item.members) > 1
    ]  # fmt: skip


def within(said: list[Collective], did: list[Collective]) -> list[Collective]:
    """What is left of ``did`` without ``said``, which is in it, in this order."""
    rest, waiting = list[Collective](), deque(said)
    for one in did:
        if waiting and one == waiting[0]:
            waiting.popleft()
        else:
            rest.append(one)
    assert not waiting, f"{waiting[0]} is planned and not simulated"
    return rest


@pytest.mark.dear
@given(case=cases(max_world=4), stage=st.integers(0, 3), nested=st.booleans(), seed=st.integers(0, 50))
@example(case=Case(shared_block=True, tied=True, keep=100), stage=3, nested=True, seed=1)
@example(case=Case(num_blocks=3, bucket_size=10**6), stage=3, nested=False, seed=2)
@example(case=Case(num_blocks=1, bucket_size=10**6, prefetch=10**6, keep=0), stage=3, nested=False, seed=2)
@example(case=Case(num_blocks=3, bucket_size=1, overlap=False), stage=1, nested=True, seed=2)
def test_a_step_is_planned_recorded_and_simulated_alike(case: Case, stage: int, nested: bool, seed: int) -> None:
    case = replace(case, world=max(case.world, 2), recompute="none", silent_ranks=(), clip_norm=0.0)
    if case.accumulation == "forwards_first":  # its contexts are open at the same time, and ranks vote
        case = replace(case, accumulation="backwards")
    reduces = [case.accumulation != "no_sync" or micro == num_micro(case) - 1 for micro in range(num_micro(case))]
    ran = sim.Programs()

    def fn(rank: int) -> Actions:
        model = make_model(case)
        units = [type(model.blocks[0]), torch.nn.Linear, torch.nn.Embedding] if nested else None
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=0.1, reduce_bucket_size=case.bucket_size, units=units,
            param_persistence_threshold=case.threshold, prefetch_bucket_size=case.prefetch,
            max_live_parameters=case.keep, overlap_comm=case.overlap,
        )  # fmt: skip

        def run(step: int) -> None:
            accumulate(model, optimizer, case, rank, step)
            optimizer.step()
            optimizer.zero_grad()

        return follow(optimizer.sharded, lambda like: optimizer.plan(reduces=reduces, like=like), run)

    found = sim.run(case.world, fn, seed=seed, programs=ran, transport="native")
    everyone = tuple(range(case.world))
    programs = [program_of(a, seconds=lambda c: float(c.flops), members=lambda _: everyone) for a in found]
    for planned, program, seen in zip(found, programs, ran.programs(), strict=True):
        said = planned.collectives()
        assert started(program) == said
        assert started(seen)[-len(said) :] == said or not said
    time = simulate_events(programs, lambda start: 0.0)
    for planned, computed in zip(found, time.computed, strict=True):
        work = planned.of_kind(Kind.COMPUTE)
        assert [end - start for start, end, _ in computed] == [c.flops for c in work]
        assert sum(c.flops for c in work) == planned.flops > 0


@pytest.mark.dear
@examples(times=0.3, quick=1)
@given(micro_batches.cases())
@example(micro_batches.Case(stage=3, max_bytes=500, prefetch=0, keep=0))
@example(micro_batches.Case(stage=3, world=4, hpz=True, max_bytes=0, shared=True, nested=True, host=True))
@example(micro_batches.Case(stage=3, max_bytes=None, each=(0, 1, 2), nested=True))
def test_a_window_is_planned_recorded_and_simulated_alike(case: micro_batches.Case) -> None:
    case = dataclasses.replace(case, recompute=False, silent=())
    ran = sim.Programs()

    def fn(rank: int) -> Actions:
        model, optimizer = micro_batches.build(case)

        def run(step: int) -> None:
            micro_batches.drive(model, optimizer, case, rank, step)
            optimizer.step()
            optimizer.zero_grad()

        def plan(like: Actions | None) -> Actions:
            return optimizer.plan(drives_of(case), max_bytes=case.max_bytes, like=like)

        return follow(optimizer.sharded, plan, run)

    found = sim.run(case.world, fn, seed=case.seed, programs=ran, transport="native")
    for planned, program in zip(found, ran.programs(), strict=True):
        said = [one for one in planned.collectives() if one.size > 1]
        assert [collective(start) for start in third_step(program)] == said


@pytest.mark.dear
@examples(times=0.5, quick=1)
@given(case=families.cases(), early=st.booleans())
@example(families.Case(options=(("zero_hpz_partition_size", 2), ("max_live_parameters", 0))), False)
def test_experts_tiers_and_groups_are_planned_recorded_and_simulated_alike(case: families.Case, early: bool) -> None:
    case = replace(case, clip_norm=0.0)
    ran = sim.Programs()

    def fn(rank: int) -> Actions:
        model, optimizer, replica = families.build(case, rank, update_in_backward=early)

        def run(step: int) -> None:
            model(families.tokens(case, replica, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return follow(optimizer.sharded, lambda like: optimizer.plan(like=like), run)

    found = sim.run(case.world, fn, seed=case.seed, programs=ran, transport="native")
    sizes = [getattr(case, axis) for axis in case.order]
    places = torch.arange(case.world).view(sizes).movedim(case.order.index("tensor"), -1).reshape(-1, case.tensor)
    # The second stage of a transfer begins when the first is over, and is said of the action that it belongs to.
    options = dict(case.options)
    two_stages = options.get("mics_shard_size") or options.get("hierarchical_all_reduce")
    of_tensor = {tuple(ranks) for ranks in places.tolist()}
    for planned, program in zip(found, ran.programs(), strict=True):
        begun = third_step(program)
        own = [start for start in begun if start.op == "all_to_all_single" or start.members in of_tensor]
        # Tokens to experts and back, and what tensor ranks add up, forward and backward: those are the model's.
        assert len(own) == 4 * (case.expert > 1) + 2 * (case.tensor > 1)
        did = [collective(start) for start in begun if start not in own]
        said = [one for one in planned.collectives() if one.size > 1]
        assert Counter(did) == Counter(said)
        if not two_stages:
            assert did == said


@pytest.mark.dear
@examples(times=0.15, quick=1)
@given(case=pipelines(), max_bytes=st.sampled_from([None, 0, 600, 10**6]), reduce=st.sampled_from(["once", "each"]))
@example(Pipeline(schedule="zb_v", data=2, stage=3), 600, "once")
@example(Pipeline(schedule="interleaved_1f1b", data=2, stage=3, pipe=2), 10**6, "each")
@example(Pipeline(data=2, stage=2, tied=True), None, "each")
@example(Pipeline(schedule="zb_v", pipe=3, data=1, stage=0, num_micro=1, num_blocks=4, tied=True), None, "once")
def test_a_batch_of_a_pipeline_is_planned_recorded_and_simulated_alike(
    case: Pipeline, max_bytes: int | None, reduce: Any
) -> None:  # fmt: skip
    case = replace(case, max_bytes=max_bytes, reduce=reduce, checkpoint_every=0, clip=0.0)
    ran = sim.Programs()

    def fn(rank: int) -> tuple[Actions, Any, int, int]:
        engine = engine_of(case)

        def plan(like: Actions | None) -> Actions:
            drives = [Drive(**given) for given in engine._runner.drives(engine.accumulation)]
            return engine.optimizer.plan(drives, max_bytes=case.max_bytes, like=like)

        planned = follow(engine.sharded, plan, lambda step: engine.train_batch(batches(case, engine, step)))
        steps = engine._runner._plan(engine.accumulation, trains=True).program
        messages = Counter(transfer.sends for step in steps for transfer in step.transfers)
        return planned, messages, engine._runner.sent_bytes(engine.accumulation) or 0, engine.optimizer.alike.size

    found = sim.run(case.pipe * case.data, fn, seed=0, programs=ran, transport="native")
    for rank, ((planned, messages, sent, alike), program) in enumerate(zip(found, ran.programs(), strict=True)):
        begun = third_step(program)
        mine = [start for start in begun if start.op == "send" and f": {rank} to " in start.stream]
        assert sum(start.num_bytes for start in mine) == sent
        assert Counter(start in mine for start in begun if start.op == "send") == messages
        did = [collective(start) for start in begun if start.op != "send"]
        said = [one for one in planned.collectives() if one.size > 1]
        # Beside these a few numbers that ranks tell each other: the data of the batch, the loss, needs, the record.
        rest = within(said, did)
        assert len(rest) <= 8
        for one in rest:
            assert one.op in ("all_gather", "all_reduce")
            assert one.num_bytes <= 8 * (alike + 10) * one.size


def test_a_recording_of_something_else_is_refused() -> None:
    def fn(rank: int) -> None:
        model = make_model(Case())
        optimizer = ZeroOptimizer(model, stage=3, lr=0.1, param_persistence_threshold=0)
        with WorkCounter() as work, optimizer.sharded.record(work) as actions:
            accumulate(model, optimizer, Case(), rank, 0)
            optimizer.step()
        with pytest.raises(ValueError, match=r"the step goes on with .* and the recording with nothing: record"):
            optimizer.plan(like=Actions(actions[:9]))
        with pytest.raises(ValueError, match=r"the step is over, and the recording goes on with .*unshard"):
            optimizer.plan(like=Actions([*optimizer.plan(), *actions]))

    sim.run(2, fn)
