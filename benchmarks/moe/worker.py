"""One rank of a measurement, in a fresh process of one gloo group. Writes its figures as JSON."""

from __future__ import annotations

from typing import Any

from benchmarks.launch import answer
from benchmarks.moe import memory, parallel, speed
from benchmarks.moe.shapes import Shape


def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """What ``spec`` asks for."""
    shape = Shape(**spec["shape"])
    if spec["section"] == "speed":
        return speed.measure(shape, spec["routings"], spec["rounds"], spec["threads"], spec["names"])
    if spec["section"] == "memory":
        return memory.measure(shape, spec["routing"], spec["name"])
    return parallel.measure(shape, spec["routing"], spec["rounds"], spec["names"], rank)


if __name__ == "__main__":
    answer(measure)
