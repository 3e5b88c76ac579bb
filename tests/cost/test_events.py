"""Programs get their time: against a recursive definition of it, and by laws."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.cost import read_hardware
from zoo.cost.events import Compute, EventError, Program, Start, Wait, cost_on, simulate_events

SECONDS = st.integers(0, 8).map(lambda n: n / 4)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Program], dict[Any, float]]:
    """Ranks that begin collectives in one order and wait for them when they like."""
    size = draw(st.integers(1, 4))
    programs: list[list[Any]] = [[] for _ in range(size)]
    waiting: list[list[Any]] = [[] for _ in range(size)]
    costs = {}
    for key in range(draw(st.integers(0, 7))):
        members = draw(st.sets(st.integers(0, size - 1), min_size=1).map(lambda s: tuple(sorted(s))))
        stream = draw(st.sampled_from("ab")) + str(members)
        costs[key] = draw(SECONDS)
        for rank in range(size):
            if draw(st.booleans()):
                programs[rank].append(Compute(draw(SECONDS), f"c{rank}"))
            if waiting[rank] and draw(st.booleans()):
                programs[rank].append(Wait(tuple(draw(st.sets(st.sampled_from(waiting[rank]), min_size=1)))))
            if rank in members:
                programs[rank].append(Start(key, members, stream, "all_reduce", name=f"k{key}"))
                waiting[rank].append(key)
    for rank in range(size):
        if waiting[rank] and draw(st.booleans()):
            programs[rank].append(Wait((waiting[rank][-1],)))
    return list(programs), costs


def defined(programs: list[Program], costs: dict[Any, float]) -> tuple[list[float], dict[Any, float]]:
    """When each rank is through and each communication over, by recursion."""
    place = {(r, i.key): n for r, p in enumerate(programs) for n, i in enumerate(p) if isinstance(i, Start)}
    first = {i.key: i for p in programs for i in p if isinstance(i, Start)}

    @functools.cache
    def through(rank: int, count: int) -> float:
        if count == 0:
            return 0.0
        item, before = programs[rank][count - 1], through(rank, count - 1)
        if isinstance(item, Compute):
            return before + item.seconds
        return max([before, *map(over, item.keys)]) if isinstance(item, Wait) else before

    @functools.cache
    def over(key: Any) -> float:
        begin = 0.0
        for rank in first[key].members:
            at = place[rank, key]
            begin = max(begin, through(rank, at))
            earlier = [i.key for i in programs[rank][:at] if isinstance(i, Start) and i.stream == first[key].stream]
            begin = max([begin, *(over(k) for k in earlier)])
        return begin + costs[key]

    return [through(r, len(p)) for r, p in enumerate(programs)], {key: over(key) for key in first}


@given(jobs())
def test_time_is_as_defined(job: tuple[list[Program], dict[Any, float]]) -> None:
    programs, costs = job
    found = simulate_events(programs, lambda start: costs[start.key])
    ends, over = defined(programs, costs)
    assert list(found.ends_s) == ends
    for span in found.spans:
        if span.name.startswith("k") and span.stream != "wait":
            assert span.end_s == over[int(span.name[1:])]
    for rank, program in enumerate(programs):
        computed = math.fsum(i.seconds for i in program if isinstance(i, Compute))
        assert found.ends_s[rank] == pytest.approx(computed + found.waited_s[rank])
        assert found.wire_s[rank] <= found.waited_s[rank] + 1e-12


@given(jobs(), st.integers(2, 5))
def test_laws(job: tuple[list[Program], dict[Any, float]], factor: int) -> None:
    """The critical path lasts as long as all, without a gap; everything n times slower is n times longer; a faster link
    makes nothing later."""
    programs, costs = job
    found = simulate_events(programs, lambda start: costs[start.key])
    path = found.critical_path()
    assert math.fsum(s.end_s - s.start_s for s in path) == pytest.approx(found.makespan_s)
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(path))
    assert sum(found.critical_s().values()) == pytest.approx(found.makespan_s)
    slower = dict.fromkeys(range(len(programs)), float(factor))
    longer = simulate_events(programs, lambda start: factor * costs[start.key], slower=slower)
    assert longer.ends_s == pytest.approx([factor * end for end in found.ends_s])
    faster = simulate_events(programs, lambda start: costs[start.key] / factor)
    assert all(a <= b for a, b in zip(faster.ends_s, found.ends_s, strict=True))
    trace = found.to_chrome()["traceEvents"]
    assert len(trace) == len(found.spans)
    assert max((e["ts"] + e["dur"] for e in trace), default=0) <= 1e6 * max(
        [found.makespan_s, *(s.end_s for s in found.spans)]
    ) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ([[Start(0, (0, 1), "a", "x"), Wait((0,))], []], "ranks \\[0\\] wait for ever; .* is not begun by \\[1\\]"),
        ([[Wait((0,))]], "rank 0 waits for 0, which it did not begin"),
        ([[Start(0, (0,), "a", "x"), Start(0, (0,), "a", "x")]], "begins 0 twice"),
        ([[Start(0, (1,), "a", "x")]], "or is none of its members"),
        ([[Start(0, (0, 1), "a", "x")], [Start(0, (0, 1), "a", "y")]], "rank 1 begins 0 as .*, another one as"),
        ([[Compute(-1.0)]], "computes for -1.0 s"),
        ([[Start(0, (0,), "a", "free")]], "costs nan s"),
    ],
)
def test_programs_that_cannot_be_run(programs: list[Program], said: str) -> None:
    with pytest.raises(EventError, match=said):
        simulate_events(programs, lambda start: math.nan if start.op == "free" else 1.0)


def test_costs_on_a_machine() -> None:
    machine = read_hardware("h100-80")
    cost = cost_on(machine)
    part = 1e8
    inside = cost(Start(0, tuple(range(8)), "g", "all_gather_into_tensor", part))
    assert inside == pytest.approx(7 * (part / 370e9 + machine.inside.latency_s))
    apart = cost(Start(0, (0, 8), "g", "send", part))
    assert apart == pytest.approx(part / machine.between.bytes_per_s + machine.between.latency_s)
    assert 0 < cost(Start(0, tuple(range(16)), "g", "barrier")) < 1e-3
