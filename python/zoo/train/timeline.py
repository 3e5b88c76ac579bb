"""One step of a run in time: what each rank did when, for the report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zoo.comm import Communicator
from zoo.engine import Engine
from zoo.shard.runtime.timing import BACKWARD, COMMUNICATION, FORWARD, OUTSIDE, Span, timing

NAME = "timeline.json"
WARM = 3
"""Which step of a launch is timed: those before make memory, threads and files warm."""
RANKS = 8
"""The first ranks are told."""
SPANS = 2_000
"""Of each rank; the shortest of more are left out."""


class Timeline:
    """Times one step of a launch and writes it down.

    Args:
        last: the step with which the run ends; a shorter launch times that one.
    """

    def __init__(self, engine: Engine, world: Communicator, *, last: int) -> None:
        self._engine, self._world = engine, world
        self._step = min(engine.global_steps + WARM, last)
        self._spans: list[Span] | None = None
        self._missed = 0

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """What runs inside is ``step``. The ranks meet before the one that is timed, so that they count from one
        moment."""
        if step != self._step:
            yield
            return
        self._world.barrier()
        with timing(self._engine.sharded.runtime) as timer:
            yield
        staged = hasattr(self._engine.module, "num_stages")
        self._spans, self._missed = named(timer.spans, staged=staged), timer.left_out

    def write(self, out: Path | None) -> None:
        """Once, after the step that was timed. A collective."""
        spans, self._spans = self._spans, None
        if spans is None:
            return
        kept, dropped = longest(spans)
        mine = {
            "rank": self._world.rank, "left_out": dropped + self._missed,
            "spans": [
                [s.lane, s.kind, s.name, round(s.start_s, 7), round(s.end_s, 7), s.num_bytes] for s in kept
            ],
        }  # fmt: skip
        found = self._world.all_gather_object(mine if self._world.rank < RANKS else None)
        if self._world.rank == 0 and out is not None:
            content = {
                "step": self._step, "ranks_of_job": self._world.size, "device": self._engine.device.type,
                "ranks": [one for one in found if one is not None],
            }  # fmt: skip
            (out / NAME).write_text(json.dumps(content) + "\n", encoding="utf-8")


def named(spans: Sequence[Span], *, staged: bool) -> list[Span]:
    """What is outside of a forward and a backward gets a name, by what comes next: "batch", "loss" or "update".

    Stages of a pipeline wait for each other there, which is "transfers".
    """
    following, found = "update", []
    for span in reversed(spans):
        if span.lane == COMMUNICATION:
            found.append(span)
            continue
        if span.kind == OUTSIDE:
            name = "transfers" if staged and following != "update" else following
            span = Span(span.lane, name, "", span.start_s, span.end_s)
        elif span.kind in (FORWARD, BACKWARD):
            following = "batch" if span.kind == FORWARD else "loss"
        found.append(span)
    return found[::-1]


def longest(spans: Sequence[Span], most: int = SPANS) -> tuple[list[Span], int]:
    """The longest, in their order; and how many are not among them."""
    if len(spans) <= most:
        return list(spans), 0
    by_length: list[Any] = sorted(range(len(spans)), key=lambda i: spans[i].start_s - spans[i].end_s)
    return [spans[i] for i in sorted(by_length[:most])], len(spans) - most
