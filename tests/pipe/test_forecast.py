"""Law 5 for pipelines: what the schedule, as the planner's list, is forecast to send is what a batch sends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.pipe.test_engine import batches, engine_of
from tests.pipe.test_training import Case, cases

from zoo import sim

AGREED = {"all_gather", "reduce_scatter", "send"}
"""Beside these there are the loss and its mean."""
NUM_SUMS = 5
"""Numbers that the record of a step adds up over ranks."""


@pytest.mark.slow
@given(case=cases(), max_bytes=st.sampled_from([None, 0, 600, 10**6]), reduce=st.sampled_from(["once", "each"]))
@example(Case(schedule="zb_v", data=2, stage=3), 600, "once")
@example(Case(schedule="interleaved_1f1b", data=2, stage=3, pipe=2), 10**6, "each")
@example(Case(data=2, stage=2, tied=True), None, "each")
@example(Case(data=2, stage=0, pipe=2, num_micro=1, num_blocks=0), None, "once")  # few calls: no number may be missed
def test_a_batch_sends_what_is_forecast(case: Case, max_bytes: int | None, reduce: str) -> None:
    case = replace(case, max_bytes=max_bytes, reduce=reduce, checkpoint_every=0, clip=0.0)

    def fn(rank: int) -> None:
        engine = engine_of(case)
        forecast = engine.forecast()
        for step in range(4):
            engine.comm.log.reset()
            engine.train_batch(batches(case, engine, step))
            if step == 3 and case.pipe > 1:
                ops = engine.comm.log.ops
                agreed = 8 * 8 * (case.pipe * case.data - 1)  # on the data of the batch
                agreed += 8 * NUM_SUMS * (case.data - 1 + case.pipe - 1)
                # What a step needs alike, with how many micro-batches it had, and over the stages whether it was.
                agreed += 8 * ((engine.optimizer.alike.size + 1) * (case.data - 1) + case.pipe - 1)
                for op in sorted(AGREED & (set(ops) | set(forecast.wire_bytes))):
                    measured, calls = (ops[op].wire_bytes, ops[op].count) if op in ops else (0, 0)
                    expected = forecast.wire_bytes.get(op, 0) + (agreed if op == "all_gather" else 0)
                    assert measured == pytest.approx(expected, abs=calls + 1), (op, rank)
            forecast = engine.forecast()

    sim.run(case.pipe * case.data, fn, seed=0)


def test_before_the_first_batch_the_messages_are_not_known_and_gathers_are() -> None:
    case = Case(data=2, stage=3, pipe=2, max_bytes=0)

    def fn(rank: int) -> None:
        engine = engine_of(case)
        before = engine.forecast()
        assert "send" not in before.wire_bytes
        for step in range(2):
            engine.train_batch(batches(case, engine, step))
        after = engine.forecast()
        assert after.wire_bytes["send"] > 0
        assert before.wire_bytes["all_gather"] == after.wire_bytes["all_gather"]
        assert engine.forecast(2).wire_bytes["send"] * 2 == after.wire_bytes["send"]
        with pytest.raises(ValueError, match=r"num_micro_batches of forecast\(\) got 0 .*whole number"):
            engine.forecast(0)

    sim.run(4, fn, seed=0)
