"""Law 4: every rank issues the same collectives in the same order, and the list of actions says which.

The collectives of a recording are the operations that the simulator saw, on every rank, one by one with their sizes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from zoo import sim
from zoo.plan import Actions, Collective, Kind
from zoo.zero import Precision, ZeroOptimizer

from .cases import Case, accumulate, cases, groups_of, loss_of, make_model, num_micro, optimizer_of

OPS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}

Run = Callable[[torch.nn.Module, ZeroOptimizer, Case, int, int], Any]


def windowed(model: torch.nn.Module, optimizer: ZeroOptimizer, case: Case, rank: int, step: int) -> None:
    """Forwards first, then backwards in the same order; the first is reduced by itself."""
    with optimizer.sharded.window(max_bytes=case.keep) as window:
        losses = []
        for micro in range(num_micro(case)):
            with window.forward(micro):
                losses.append(loss_of(model, case, rank, step, micro))
        for micro, loss in enumerate(losses):
            with window.backward(micro, reduce=micro == 0):
                loss.backward()  # type: ignore[no-untyped-call]


def record(case: Case, stage: int, rank: int, trace: sim.Trace, run: Run, **options: Any) -> tuple[Actions, list[Any]]:
    """Two steps; the actions, and the operations of this rank in the trace meanwhile."""
    model = make_model(case)
    cls, arguments = optimizer_of(case)
    optimizer = ZeroOptimizer(
        model, stage=stage, optimizer=cls, params=groups_of(model, case), reduce_bucket_size=case.bucket_size,
        param_persistence_threshold=case.threshold, prefetch_bucket_size=case.prefetch,
        max_live_parameters=case.keep, overlap_comm=case.overlap, **{**arguments, **options},
    )  # fmt: skip
    before = len(trace.of_rank(rank))
    with optimizer.sharded.record() as actions:
        for step in range(2):
            run(model, optimizer, case, rank, step)
            optimizer.step()
            optimizer.zero_grad()
    return actions, trace.of_rank(rank)[before:]


def seen(event: sim.Event) -> Collective:
    op = OPS.get(event.op, event.op)
    num_bytes = event.num_bytes * (len(event.group) if op == "all_gather" else 1)
    return Collective(op=op, size=len(event.group), num_bytes=num_bytes)


def check(
    case: Case, stage: int, run: Run, seed: int, *, in_order: bool = True, **options: Any
) -> list[Actions]:  # fmt: skip
    trace = sim.Trace()
    found = sim.run(
        case.world, lambda rank: record(case, stage, rank, trace, run, **options), seed=seed, trace=trace,
        transport="native",
    )  # fmt: skip
    for rank, (actions, events) in enumerate(found):
        said, did = actions.collectives(), [seen(event) for event in events]
        if not in_order:
            said, did = sorted(said, key=str), sorted(did, key=str)
        assert said == did, f"rank {rank}"
        assert actions == found[0][0], f"rank {rank}: {_first_difference(actions, found[0][0])}"
    return [actions for actions, _ in found]


def _first_difference(mine: Actions, theirs: Actions) -> str:
    return next((f"{a} / {b}" for a, b in zip(mine, theirs, strict=False) if a != b), "lengths")


@given(
    case=cases(max_world=4), stage=st.integers(0, 3), drives=st.booleans(), seed=st.integers(0, 50),
    computes=st.sampled_from([None, torch.bfloat16]),
)  # fmt: skip
@example(case=Case(accumulation="forwards_first", silent_ranks=(1,)), stage=3, drives=False, seed=1, computes=None)
@example(case=Case(accumulation="backwards", keep=10**6), stage=3, drives=True, seed=2, computes=torch.bfloat16)
def test_the_list_is_what_the_ranks_did(
    case: Case, stage: int, drives: bool, seed: int, computes: torch.dtype | None
) -> None:
    case = replace(case, world=max(case.world, 2), clip_norm=0.0)
    check(case, stage, windowed if drives else accumulate, seed, precision=Precision(param=computes))


def test_shard_groups_and_secondary_copies() -> None:
    case = Case(world=4, keep=0, num_blocks=3)
    hpz = check(case, 3, accumulate, 3, zero_hpz_partition_size=2, ranks_per_node=2)
    assert {c.size for c in hpz[0].collectives()} == {2, 4}
    for stage in (1, 2, 3):
        # The sum over replicas begins at the next reduction: it is said of the one it belongs to.
        check(case, stage, accumulate, 3, in_order=False, mics_shard_size=2)


def test_what_a_recording_says() -> None:
    case = Case(num_blocks=2, keep=0, accumulation="no_sync", bucket_size=1)
    actions = check(case, 3, accumulate, 0)[0]
    assert {a.kind for a in actions} >= {Kind.UNSHARD, Kind.PREFETCH, Kind.RESHARD, Kind.REDUCE, Kind.WAIT}
    first = actions.of_kind(Kind.UNSHARD)[0]
    assert (first.context, first.unit, first.moment.value) == ("pass 1", "embed", "forward")
    assert {a.context for a in actions.of_kind(Kind.REDUCE)} <= {f"pass {n}" for n in range(1, 5)} | {""}
    assert actions.whole_bytes()[-1] == 0
    assert len(str(actions).splitlines()) == len(actions) + 1
    assert {a.kind for a in check(case, 1, accumulate, 0)[0]} == {Kind.REDUCE, Kind.WAIT, Kind.PUBLISH}
    driven = check(replace(case, accumulation="backwards"), 3, windowed, 0)[0]
    assert {a.context for a in driven} == {"micro-batch 0", "micro-batch 1", ""}


def test_nothing_is_left_of_a_recording() -> None:
    model = make_model(Case())
    optimizer = ZeroOptimizer(model, stage=3, lr=0.1, param_persistence_threshold=0)
    sharded = optimizer.sharded
    owners = [sharded.runtime.residency, sharded.runtime.backward, sharded.executor]
    owners += [part for b in optimizer.buckets for part in (b.parameters, b.gradients)]

    def methods() -> list[list[str]]:
        return [[name for name, value in vars(owner).items() if callable(value)] for owner in owners]

    before = methods()
    with sharded.record() as outer, sharded.record() as inner:
        loss_of(model, Case(), 0, 0, 0).backward()  # type: ignore[no-untyped-call]
        assert methods() == before  # nothing stands in for anything meanwhile
    assert sharded.executor.watchers == ()
    assert outer == inner
    assert len(outer) > 0
    assert methods() == before
    count = len(outer)
    optimizer.step()
    assert len(outer) == count


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def test_the_example_of_the_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/zero/actions.md").read_text(encoding="utf-8")
    code, printed = page.split("```python\nwith optimizer.sharded.record()")[1].split("```\n\n```\n")

    def fn(rank: int) -> str:
        model = TwoLayers()
        optimizer = ZeroOptimizer(
            model, stage=3, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1, max_live_parameters=0
        )
        shown = io.StringIO()
        names = {"optimizer": optimizer, "model": model, "x": torch.ones(1, 6), "print": lambda a: print(a, file=shown)}
        exec("with optimizer.sharded.record()" + code, names)
        return shown.getvalue()

    assert sim.run(2, fn, transport="native") == [printed.split("```")[0]] * 2
