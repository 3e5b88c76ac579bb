"""The simulator: the published bubbles, and random costs against equations that are solved by iteration."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipe.battery import CASES, Case, all_sizes, some_sizes, tables
from tests.profiles import examples

from zoo.cost.stages import StageCosts
from zoo.pipe import Kind, ScheduleError, Table, build, lower
from zoo.pipe.simulate import Simulation, read_spans, simulate, write_spans

BY_NAME = pytest.mark.parametrize("case", CASES, ids=str)


# -- bubbles ----------------------------------------------------------------------------------------------------------


def check_bubble(case: Case, num_ranks: int, num_micro_batches: int) -> None:
    found = simulate(case.build(num_ranks, num_micro_batches))
    assert found.bubble == pytest.approx(case.bubble(num_ranks, num_micro_batches), abs=1e-12), (
        f"{case} on {num_ranks} ranks, {num_micro_batches} micro-batches"
    )
    assert sum(found.exposed_s) == 0
    assert list(found.peak_bytes) == case.kept(num_ranks, num_micro_batches)


@BY_NAME
@given(data=st.data())
def test_bubbles_and_memory_are_as_published(case: Case, data: st.DataObject) -> None:
    sizes = [(r, m) for r, m in all_sizes(case, 8, 24) if case.optimal(r, m)]
    check_bubble(case, *data.draw(st.sampled_from(sizes)))


@pytest.mark.parametrize(
    "sizes", [pytest.param(some_sizes, marks=pytest.mark.slow), pytest.param(all_sizes, marks=pytest.mark.campaign)]
)
@BY_NAME
def test_bubbles_of_all_sizes_are_as_published(case: Case, sizes: Any) -> None:
    for num_ranks, num_micro_batches in sizes(case):
        if case.optimal(num_ranks, num_micro_batches):
            check_bubble(case, num_ranks, num_micro_batches)


def test_the_bubbles_in_figures() -> None:
    assert simulate(build("1f1b", 4, 8)).bubble == pytest.approx(3 / 11)
    assert simulate(build("interleaved_1f1b", 4, 8)).bubble == pytest.approx(3 / 19)
    assert simulate(build("zb_h1", 4, 8)).bubble == pytest.approx(3 / 27)
    assert simulate(build("zb_v", 4, 8)).bubble == pytest.approx(3 / 51)


# -- any costs --------------------------------------------------------------------------------------------------------


def solve(table: Table, costs: StageCosts) -> tuple[dict[Any, float], float]:
    """When each computation starts, and the makespan: the least solution of what one time says about another.

    Written from the definitions and the table alone, as equations that are iterated until nothing changes.
    """
    by_rank = [[(slot, c) for slot, c in enumerate(row) if c is not None] for row in table.rows]
    messages: dict[Any, tuple[Any, int, int, int]] = {}  # message: (producer, from rank, to rank, slot)
    for source, row in enumerate(by_rank):
        for slot, c in row:
            step = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: -1}.get(c.kind, 0)
            if step and 0 <= c.stage + step < table.num_stages and table.rank_of[c.stage + step] != source:
                messages[step == 1, c.stage, c.micro_batch] = (c, source, table.rank_of[c.stage + step], slot)
    queues: dict[tuple[int, int], list[Any]] = {}
    for key in sorted(messages, key=lambda k: (messages[k][3], k)):
        queues.setdefault(messages[key][1:3], []).append(key)
    before = {b: a for queue in queues.values() for a, b in itertools.pairwise(queue)}

    def seconds(c: Any) -> float:
        both = costs.input_s[c.stage] + costs.weight_s[c.stage]  # type: ignore[index]
        of = {Kind.FORWARD: costs.forward_s, Kind.INPUT: costs.input_s, Kind.WEIGHT: costs.weight_s}
        return float(both if c.kind is Kind.BACKWARD else of[c.kind][c.stage])  # type: ignore[index]

    def transfer_s(key: Any) -> float:
        activation, stage, _ = key
        size = costs.activation_bytes[stage if activation else stage - 1]  # type: ignore[index]
        return costs.latency_s + float(size) / costs.bytes_per_s

    start: dict[Any, float] = dict.fromkeys((c for row in by_rank for _, c in row), 0.0)
    through: dict[Any, float] = dict.fromkeys(messages, 0.0)
    leave = [[0.0] * (table.num_slots + 1) for _ in by_rank]  # of rank and slot: when the rank leaves the slot
    while True:
        old = (dict(start), dict(through), [list(row) for row in leave])
        ends = {c: t + seconds(c) for c, t in start.items()}
        come = [list(row) for row in leave]  # when the rank comes to the boundary after the slot
        for rank, row in enumerate(table.rows):
            for slot, c in enumerate(row):
                come[rank][slot] = leave[rank][slot - 1] if c is None else ends[c]
        for key, (c, source, target, slot) in messages.items():
            begin = max(come[source][slot], through.get(before.get(key), 0.0))
            if not (costs.overlapped and costs.receives_ahead):
                begin = max(begin, come[target][slot])
            through[key] = begin + transfer_s(key)
            assert ends[c] <= come[source][slot]
        for rank, row in enumerate(table.rows):
            for slot, c in enumerate(row):
                there = [through[k] for k, m in messages.items() if m[3] == slot and rank in m[1:3]]
                leave[rank][slot] = max([come[rank][slot], *([] if costs.overlapped else there)])
                if c is not None:
                    inputs = [k for k, m in messages.items() if m[2] == rank and feeds(k, c)]
                    start[c] = max([leave[rank][slot - 1], *(through[k] for k in inputs)])
        if old == (start, through, leave):
            return start, max(row[-2] for row in leave)


def feeds(message: Any, c: Any) -> bool:
    activation, stage, micro_batch = message
    kinds, step = ((Kind.FORWARD,), 1) if activation else ((Kind.BACKWARD, Kind.INPUT), -1)
    return c.kind in kinds and (c.stage, c.micro_batch) == (stage + step, micro_batch)


@st.composite
def costs_of(draw: st.DrawFn, num_stages: int) -> StageCosts:
    def numbers(least: int = 0) -> list[float]:
        # Eighths: sums are exact, so that both ways of adding them up are equal.
        return [n / 8 for n in draw(st.lists(st.integers(least, 40), min_size=num_stages, max_size=num_stages))]

    return StageCosts(
        forward_s=numbers(),
        input_s=numbers(),
        weight_s=numbers(),
        activation_bytes=numbers(),
        latency_s=draw(st.integers(0, 16)) / 8,
        bytes_per_s=draw(st.sampled_from([0.5, 1.0, 4.0, math.inf])),
        overlapped=draw(st.booleans()),
        receives_ahead=draw(st.booleans()),
        kept_bytes=numbers(),
    )


@examples(times=4)
@given(st.data())
def test_any_costs_give_the_times_that_the_definitions_give(data: st.DataObject) -> None:
    table = data.draw(tables(4, 6))
    costs = data.draw(costs_of(table.num_stages))
    found = simulate(table, costs)
    start, makespan = solve(table, costs)
    assert {s.computation: s.start_s for s in found.spans} == start
    assert found.makespan_s == makespan
    busy = sum(s.end_s - s.start_s for s in found.spans)
    if makespan:
        assert found.bubble == pytest.approx(1 - busy / (table.num_ranks * makespan))
    for rank in range(table.num_ranks):
        assert 0 <= found.exposed_s[rank] <= makespan - found.busy_s[rank]
        assert [s.computation for s in found.spans if s.rank == rank] == list(table.order(rank))


@given(st.data())
def test_transfers_that_cost_nothing_leave_nothing_exposed_and_overlap_never_costs_time(data: st.DataObject) -> None:
    table = data.draw(tables(4, 6))
    given_costs = data.draw(costs_of(table.num_stages))
    known = {name: getattr(given_costs, name) for name in given_costs.__dataclass_fields__}
    free = simulate(table, StageCosts(**{**known, "latency_s": 0.0, "bytes_per_s": math.inf}))
    modes = [{"receives_ahead": True}, {"receives_ahead": False}, {"overlapped": False}]
    times = [simulate(table, StageCosts(**{**known, "overlapped": True, **mode})).makespan_s for mode in modes]
    assert sum(free.exposed_s) == 0
    assert times == sorted(times)


def test_exposed_communication_in_figures() -> None:
    table = build("1f1b", 2, 1)
    found = simulate(table, StageCosts(latency_s=0.5))  # F, transfer, F, B, transfer, B
    assert found.makespan_s == 7.0
    assert found.exposed_s == (0.5, 0.5)
    assert found.bubble == pytest.approx(1 - 6 / 14)
    # The second message waits for the first one; nothing else is under way.
    inference = simulate(build("inference", 2, 2), StageCosts(activation_bytes=6.0, bytes_per_s=2.0))
    assert [(s.start_s, s.end_s) for s in inference.spans] == [(0, 1), (1, 2), (4, 5), (7, 8)]
    assert inference.exposed_s == (0, 5)
    late = simulate(build("inference", 2, 2), StageCosts(activation_bytes=6.0, bytes_per_s=2.0, receives_ahead=False))
    assert [(s.start_s, s.end_s) for s in late.spans] == [(0, 1), (1, 2), (4, 5), (8, 9)]
    assert inference.peak_bytes == (0, 0)


def test_kept_bytes() -> None:
    table = build("zb_h1", 2, 3)  # rank 0: F F I W F I W I W; rank 1: F I F I W F I W W
    assert simulate(table, StageCosts(kept_bytes=[10, 100])).peak_bytes == (20, 200)
    assert simulate(table, StageCosts(kept_bytes=[10, 100], freed_by_input=0.75)).peak_bytes == (20, 125)
    assert simulate(build("1f1b", 2, 3), StageCosts(kept_bytes=4)).peak_bytes == (8, 4)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: simulate(build("1f1b", 2, 2), StageCosts(input_s=[1, 2, 3])), "3 numbers for input_s; .* 2 stages"),
        (lambda: StageCosts(forward_s=-1.0), "0 or more"),
        (lambda: StageCosts(bytes_per_s=0.0), "more than 0"),
        (lambda: StageCosts(freed_by_input=1.5), "at most 1"),
    ],
)
def test_mistakes_are_told(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_programs_that_wait_for_ever_are_told() -> None:
    table = build("1f1b", 2, 2)
    first, second = lower(table)
    with pytest.raises(ScheduleError, match=r"ranks \[1\] wait for ever"):
        simulate(table, programs=(first[:1], second))


# -- timelines as documents -------------------------------------------------------------------------------------------


@given(tables(3, 4))
def test_a_timeline_survives_json(table: Table) -> None:
    spans = simulate(table).spans
    assert read_spans(json.loads(json.dumps(write_spans(spans)))) == spans


@pytest.mark.parametrize(
    "document",
    [
        [], {}, {"spans": []}, {"spans": [{"rank": 0}]}, {"spans": ["0F0"]},
        {"spans": [{"rank": 0, "computation": "0X0", "start_s": 0, "end_s": 1}]},
        {"spans": [{"rank": 0, "computation": "0F0", "start_s": 2, "end_s": 1}]},
        {"spans": [{"rank": 0, "computation": 5, "start_s": 0, "end_s": 1}]},
        {"spans": [{"rank": 0, "computation": "0F0", "start_s": "nan", "end_s": 1}]},
    ],
)  # fmt: skip
def test_documents_that_are_no_timeline(document: Any) -> None:
    with pytest.raises(ValueError, match="timeline"):
        read_spans(document)


def test_a_simulation_says_what_it_is_of() -> None:
    found = simulate(build("gpipe", 2, 2))
    assert isinstance(found, Simulation)
    assert found.table.name == "gpipe"
