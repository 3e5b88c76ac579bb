"""One rank of a measurement, in a fresh process of one gloo group. Writes its figures as JSON."""

from __future__ import annotations

from typing import Any

from benchmarks.launch import answer
from benchmarks.pipe import step, timeline
from benchmarks.pipe.model import Shape


def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """What ``spec`` asks for."""
    if spec["section"] == "sleeps":
        return timeline.measure_sleeps(spec["schedule"], spec["micro_batches"], spec["rounds"])
    shape = Shape(**spec["shape"])
    if spec["section"] == "timeline":
        return timeline.measure(shape, spec["schedule"], spec["rounds"])
    if spec["section"] == "memory":
        return step.measure_memory(shape, spec["name"], spec["tensors"])
    return step.measure(shape, spec["rounds"], spec["names"], rank)


if __name__ == "__main__":
    answer(measure)
