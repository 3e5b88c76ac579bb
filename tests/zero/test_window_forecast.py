"""Law 5 for windows: what a schedule's list of drives is forecast to send is what a step of that schedule sends."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from tests.shard.runtime.micro_batches import Case, build, cases, drive

from zoo import sim
from zoo.zero import Drive


def drives_of(case: Case) -> list[Drive]:
    found: list[Drive] = []
    for place, micro in enumerate(case.events):
        if micro in case.events[:place]:
            found.append(Drive(verb="backward", key=micro, reduce=micro in case.each))
        else:
            found.append(Drive(verb="forward", key=micro, like=micro))
    return found


@pytest.mark.dear
@given(cases())
@example(Case(stage=3, max_bytes=500, prefetch=0, keep=0))
@example(Case(stage=3, world=4, hpz=True, max_bytes=500))
@example(Case(stage=3, max_bytes=None, each=(0, 1, 2), nested=True))
@example(Case(stage=1, each=(0, 2)))
@example(Case(stage=3, max_bytes=10**6, prefetch=10**6, host=True, shared=True))
def test_a_window_sends_what_its_drives_are_forecast_to(case: Case) -> None:
    case = dataclasses.replace(case, recompute=False)

    def fn(rank: int) -> None:
        model, optimizer = build(case)
        forecast = None
        for step in range(4):
            optimizer.comm.log.reset()
            drive(model, optimizer, case, rank, step)
            optimizer.step()
            optimizer.zero_grad()
            if forecast is not None and step > 2:
                ops = optimizer.comm.log.ops
                for op in set(ops) | set(forecast.wire_bytes):
                    measured, calls = (ops[op].wire_bytes, ops[op].count) if op in ops else (0, 0)
                    assert measured == pytest.approx(forecast.wire_bytes.get(op, 0), abs=calls + 1), op
            forecast = optimizer.forecast(drives_of(case), max_bytes=case.max_bytes)

    sim.run(case.world, fn, seed=case.seed)
