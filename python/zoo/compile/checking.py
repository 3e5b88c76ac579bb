"""What is true of a graph after its passes, whatever they did. Each pass is followed by it; it costs one walk."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import Any

from torch import fx

from zoo.compile.capture import alias_of, readers
from zoo.compile.ops import ACCUMULATE, BACK, ENTER, EVENTS, LEAVE
from zoo.compile.passes.keep import made_of_parameter
from zoo.compile.plan import GraphPlan, placeholders, values_of
from zoo.shard.buckets import Bucket

_NAMES = {ENTER: "enter", LEAVE: "leave", BACK: "back to"}


class PassError(AssertionError):
    """A pass has broken a graph."""


def check(graph: fx.GraphModule, plan: GraphPlan) -> None:
    """Raise :class:`PassError` unless

    * inputs and outputs are those that torch traced, and one input for the order of events;
    * events come in the order of the model's calls, each once, and write to that input and to the parameters that they
      bring and take, so that no compiler moves a read over them;
    * what reads a partitioned parameter stands between the event that brings it and the one that takes it;
    * no output but the parameter itself is memory of a partitioned parameter, and nothing that forward keeps is made of
      one parameter alone;
    * each gradient is taken once, after the event at which backward comes to its bucket and before the one at which it
      is through with it.

    It holds for graphs that the pass "place" has been over. What they compute is not looked at.
    """
    at = {node: i for i, node in enumerate(graph.graph.nodes)}
    order = _check_ends(graph.graph, plan)
    events = _check_events(graph.graph, plan, at, order)
    _check_reads(graph.graph, plan, at, events)
    _check_gradients(graph.graph, plan, at, events)


def _check_ends(graph: fx.Graph, plan: GraphPlan) -> fx.Node:
    """Inputs and outputs. The input for the order of events."""
    names, outputs = plan.ends[plan.backward]
    inputs = list(placeholders(graph))
    found = [node.name for node in inputs]
    if len(found) != len(names) + 1 or found[:-1] != names:
        raise PassError(f"its inputs are {found}, and not {names} and one for the order of events.")
    if (now := len(values_of(graph))) != outputs:
        raise PassError(f"it returns {now} values, and not {outputs}.")
    return inputs[-1]


def _check_events(
    graph: fx.Graph, plan: GraphPlan, at: dict[fx.Node, int], order: fx.Node
) -> dict[tuple[Any, Any], int]:  # fmt: skip
    """Which there are, in which order, of what. The place of each."""
    found = [(node.target, node.args[2]) for node in at if node.target in EVENTS]
    wanted: list[tuple[Any, Any]] = [(BACK, number) for number in plan.captured.backs()]
    if not plan.backward:
        wanted = [(ENTER if begins else LEAVE, number) for number, begins in plan.captured.events]
        wanted.remove((LEAVE, 0))  # the model itself ends where its output is known, outside of the graph
    for number, (one, other) in enumerate(zip_longest(found, wanted)):
        if one != other:
            raise PassError(f"its event {number} is {_called(one, plan)}, and not {_called(other, plan)}.")
    moved: dict[int, set[fx.Node]] = {number: set() for number in range(len(plan.captured.calls))}
    for place, (bucket, _) in plan.parameters(graph).items():
        if bucket.partitioned:
            over = plan.captured.over_at(bucket) if plan.backward else None
            for number, call in enumerate(plan.captured.calls):
                if bucket in call.buckets or number == over:
                    moved[number].add(place)
    events = {}
    for node in at:
        if node.target in EVENTS:
            arguments: Any = node.args
            written, values, number = arguments
            lost = sorted(place.name for place in moved[number] - set(values))
            if written is not order or lost:
                raise PassError(f"{node} does not write to {', '.join(lost) or order.name}, so that reads may pass it.")
            events[node.target, number] = at[node]
        elif node.target is ACCUMULATE and node.args[0] is not order:
            raise PassError(f"{node} does not write to {order.name}, so that events may pass it.")
    return events


def _called(event: tuple[Any, Any] | None, plan: GraphPlan) -> str:
    """Such as "enter 'blocks.0' (call 3)"."""
    if event is None:
        return "missing"
    calls, (target, number) = plan.captured.calls, event
    unit = calls[number].unit.name if number in range(len(calls)) else "no unit"
    return f"{_NAMES[target]} {unit or 'the model'!r} (call {number})"


def _check_reads(
    graph: fx.Graph, plan: GraphPlan, at: dict[fx.Node, int], events: dict[tuple[Any, Any], int]
) -> None:  # fmt: skip
    """Of partitioned parameters, and what of them leaves the graph."""
    outputs = set(graph.output_node().all_input_nodes)
    partitioned = {place: found for place, found in plan.parameters(graph).items() if found[0].partitioned}
    for place, (bucket, slot) in partitioned.items():
        name, spans = bucket.called(slot), _spans(events, plan, bucket, last=len(at))
        for node in readers(place):
            if node.target not in EVENTS and not any(low < at[node] < high for low, high in spans):
                raise PassError(f"{node} reads {name!r} where it is not here.")
            if node in outputs and alias_of(node):
                raise PassError(f"{node}, in the memory of {name!r}, leaves the graph.")
    kept = values_of(graph)[plan.num_returned :] if not plan.backward else []
    for value in kept:
        if isinstance(value, fx.Node) and value not in partitioned and made_of_parameter(value, partitioned):
            raise PassError(f"{value}, made of a parameter alone, is kept for backward.")


def _check_gradients(
    graph: fx.Graph, plan: GraphPlan, at: dict[fx.Node, int], events: dict[tuple[Any, Any], int]
) -> None:  # fmt: skip
    """Which are taken, and when."""
    buckets = {bucket.index: bucket for bucket, _ in plan.captured.inputs.values()}
    found: list[Any] = [(node.args[2], node.args[3]) for node in at if node.target is ACCUMULATE]
    taken, wanted = Counter(found), Counter(plan.taken if plan.backward else ())
    for index, slot in (taken - wanted) | (wanted - taken):
        name = buckets[index].called(slot) if (index, slot) in wanted else f"number {slot} of bucket {index}"
        raise PassError(
            f"the gradient of {name!r} is taken {taken[index, slot]} times, and not {wanted[index, slot]} times."
        )
    for node in at:
        if node.target is ACCUMULATE:
            low, high = _spans(events, plan, buckets[node.args[2]], last=len(at))[0]  # type: ignore[index]
            if not low < at[node] < high:
                raise PassError(f"{node} takes a gradient when backward is not at its bucket, or is through with it.")
    values = values_of(graph)
    for number, (bucket, slot) in plan.captured.inputs.items():
        if (bucket.index, slot) in wanted and values[number] is not None:
            raise PassError(f"the gradient of {bucket.called(slot)!r} is taken, and returned as well.")


def _spans(events: dict[Any, int], plan: GraphPlan, bucket: Bucket, *, last: int) -> list[tuple[int, int]]:
    """Where the parameters of a bucket are here, in places of nodes."""
    captured = plan.captured
    if plan.backward:
        brought, over = captured.brought_at(bucket), captured.over_at(bucket)
        return [(-1 if brought is None else events[BACK, brought], last if over is None else events[BACK, over])]
    calls = [number for number, call in enumerate(captured.calls) if bucket in call.buckets]
    return [(events[ENTER, number], events.get((LEAVE, number), last)) for number in calls]
