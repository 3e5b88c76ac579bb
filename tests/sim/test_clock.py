"""Simulated time of jobs that run here too: by hand, and (slow) beside the clock of two gloo processes and a cable."""

from __future__ import annotations

from typing import Any

import benchmarks.sim.clock as clock
import pytest
from benchmarks.onebit.link import LinkError

PIPELINE = {
    "schedule": "gpipe", "micro_batches": 4, "rows": 16, "layers": 6, "width": 512, "seconds": 0.02, "steps": 5,
    "mbit": 100,
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_takes_one_slot_more_than_it_has_micro_batches(schedule: str) -> None:
    """Three layers a stage of 20 ms forward and 40 ms back, (M + S - 1) times; and two messages, there and back."""
    seconds, path = clock.simulated({**PIPELINE, "schedule": schedule})
    assert path["forward"] == pytest.approx(5 * 3 * 0.02)
    assert path["backward"] == pytest.approx(5 * 3 * 0.04)
    message = clock.LATENCY_S + 16 * 512 * 4 * clock.WIRE / (100e6 / 8)
    assert path["send"] == pytest.approx({"gpipe": 2, "1f1b": 4}[schedule] * message)
    # What ranks tell each other is a few numbers.
    assert seconds == pytest.approx(0.9 + path["send"], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        {"stage": 3, "layers": 6, "width": 512, "seconds": 0.05, "steps": 5, "mbit": 100},
        {**PIPELINE, "rows": 256, "schedule": "1f1b"},
    ],
    ids=["stage 3", "pipeline"],
)
def test_it_is_within_five_percent_of_the_clock(spec: dict[str, Any]) -> None:
    """A machine that does something else makes the clock's time longer, by at most what threads waited for a core."""
    found, _ = clock.simulated(spec)
    try:
        seconds, waited = clock.clocked(spec)
    except LinkError as error:
        pytest.skip(f"no cable: {error}")
    assert 0.95 * (seconds - waited) < found < 1.05 * seconds, (found, seconds, waited)
