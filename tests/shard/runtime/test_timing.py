"""When the runtime did what: the spans of a step."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.plan import Actions, Kind
from zoo.shard.runtime import timing as module
from zoo.shard.runtime.timing import COMMUNICATION, COMPUTE, WAIT, Span, timing
from zoo.zero import ZeroOptimizer


def steps(rank: int, stage: int, *, timed: bool = True) -> tuple[list[Span], Actions, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = ZeroOptimizer(
        model, stage=stage, optimizer=torch.optim.AdamW, lr=0.1, reduce_bucket_size=40, param_persistence_threshold=0
    )
    ticks = itertools.count()
    losses: list[float] = []
    for step in range(4):
        x = torch.full((2, 4), float(rank + step))
        watch = timed and step == 3
        watching: Any = timing(optimizer.runtime, lambda: float(next(ticks))) if watch else contextlib.nullcontext()
        with watching as timer, optimizer.sharded.record() as actions:
            loss = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert optimizer.runtime.executor.watchers == ()
    return timer.spans if timed else [], actions, losses


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_spans_are_the_recorded_actions_in_time(stage: int, ranks: int) -> None:
    for spans, actions, _ in sim.run(ranks, lambda rank: steps(rank, stage)):
        compute = [s for s in spans if s.lane == COMPUTE]
        assert compute[0].start_s < 2
        assert all(a.end_s == b.start_s for a, b in itertools.pairwise(compute)), "one thing at a time, and no gap"
        assert all(s.end_s > s.start_s for s in spans)
        assert {"forward", "backward"} <= {s.kind for s in compute}
        sent = Counter(s.kind for s in spans if s.lane == COMMUNICATION)
        expected: Counter[str] = Counter()
        for kind, names in {
            "gather": (Kind.UNSHARD, Kind.PREFETCH), "reduce": (Kind.REDUCE,), "publish": (Kind.PUBLISH,),
        }.items():  # fmt: skip
            expected[kind] = len(actions.of_kind(*names)) if ranks > 1 else 0
        assert sent == +expected
        for wait in (s for s in compute if s.kind == WAIT and ranks > 1):
            inside = [s for s in spans if s.lane == COMMUNICATION and s.name == wait.name and s.num_bytes]
            assert any(s.start_s <= wait.start_s and wait.end_s <= s.end_s for s in inside), wait


def test_timing_changes_no_bit() -> None:
    for stage in (0, 3):
        timed = sim.run(2, lambda rank, stage=stage: steps(rank, stage)[2])  # type: ignore[misc]
        plain = sim.run(2, lambda rank, stage=stage: steps(rank, stage, timed=False)[2])  # type: ignore[misc]
        assert timed == plain


def test_a_long_step_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)

    def job(rank: int) -> Any:
        return steps(rank, 3)[0]

    assert [len(spans) for spans in sim.run(2, job)] == [3, 3]
