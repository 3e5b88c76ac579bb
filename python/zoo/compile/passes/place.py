"""Puts the runtime's events into a graph: where units begin and end in forward, and where backward comes to each call.

What happens there is decided by the runtime when the graph runs, as it is where hooks do it: a gather, a prefetch, a
release, a reduction. The order of events is that of the model's calls; whatever reads a parameter stands between the
events that bring it and take it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import fx

from zoo.compile.capture import Captured, NotWholeError, alias_of, readers
from zoo.compile.ops import ACCUMULATE, BACK, ENTER, LEAVE
from zoo.compile.passes.keep import written
from zoo.compile.placing import Event
from zoo.compile.placing import place as put
from zoo.compile.plan import GraphPlan, placeholders, return_values, values_of
from zoo.shard.buckets import Bucket

ORDER = "zoo_order"


def place(graph: fx.GraphModule, plan: GraphPlan) -> fx.GraphModule:
    """See above."""
    order = _add_input(graph.graph)
    parameters = plan.parameters(graph.graph)
    _refuse(graph.graph, plan, parameters)
    places: dict[Bucket, list[fx.Node]] = defaultdict(list)
    for node, (bucket, _) in parameters.items():
        if bucket.partitioned:
            places[bucket].append(node)
    make = _backward if plan.backward else _forward
    made = put(graph.graph, make(graph.graph, plan, order, places))
    if plan.backward:
        at = {node: i for i, node in enumerate(graph.graph.nodes)}
        last = max((at[node] for node in made if node.args[1]), default=-1)
        plan.read_last = frozenset(
            bucket for bucket, inputs in places.items()
            if any(at[node] > last for place in inputs for node in readers(place))
        )  # fmt: skip
    return graph


def _add_input(graph: fx.Graph) -> fx.Node:
    last = list(placeholders(graph))[-1]
    with graph.inserting_after(last):
        return graph.placeholder(ORDER)


def _refuse(graph: fx.Graph, plan: GraphPlan, parameters: Any) -> None:
    """Raise NotWholeError if the model returns a parameter, or something in its memory, or writes to one that is not
    here afterwards."""
    if plan.backward:
        return
    changed = written(graph)
    returned = {value for value in values_of(graph)[: plan.num_returned] if isinstance(value, fx.Node)}
    for place, (bucket, slot) in parameters.items():
        if returned.intersection((place, *(node for node in readers(place) if alias_of(node)))):
            raise NotWholeError(f"the model returns {bucket.called(slot)!r}, or a view of it")
        if bucket.partitioned and place in changed:
            raise NotWholeError(f"the model writes to {bucket.called(slot)!r}")


# Forward -------------------------------------------------------------------------------------------------------------


def _forward(
    graph: fx.Graph, plan: GraphPlan, order: fx.Node, places: dict[Bucket, list[fx.Node]]
) -> list[Event]:  # fmt: skip
    captured = plan.captured
    at = {node: i for i, node in enumerate(graph.nodes)}
    uses: dict[int, list[fx.Node]] = defaultdict(list)
    for bucket, inputs in places.items():
        for place in inputs:
            for number, node in _uses_by_call(captured, bucket, place, at):
                uses[number].append(node)
    events = []
    for number, begins in captured.events:
        call = captured.calls[number]
        if number == 0 and not begins:
            continue  # the model itself ends where its output is known, outside of the graph
        values = [place for bucket in call.buckets if bucket in places for place in places[bucket]]
        if begins:
            events.append(Event(ENTER, (order, values, number), before=uses[number]))
        else:
            events.append(Event(LEAVE, (order, values, number), after=uses[number]))
    return events


def _uses_by_call(
    captured: Captured, bucket: Bucket, place: fx.Node, at: dict[fx.Node, int]
) -> list[tuple[int, fx.Node]]:
    """What touches a parameter, each with the number of the call of a unit that it belongs to."""
    calls = [i for i, call in enumerate(captured.calls) if bucket in call.buckets]
    outer = [i for i in calls if not any(_within(captured, i, j) for j in calls if j != i)]
    touches = sorted(readers(place), key=at.__getitem__)
    if len(outer) == 1:
        return [(outer[0], node) for node in touches]
    reads: dict[tuple[int, ...], list[fx.Node]] = defaultdict(list)
    for node in touches:
        if not alias_of(node):
            reads[_calls_of(captured, node, outer)].append(node)
    numbers: dict[fx.Node, int] = {}
    for possible, nodes in reads.items():  # a unit that is called several times reads as often each time
        if len(nodes) % len(possible):
            raise NotWholeError(f"{bucket.label} is called {len(possible)} times, and read {len(nodes)} times")
        share = len(nodes) // len(possible)
        numbers |= {node: possible[i // share] for i, node in enumerate(nodes)}
    for node in reversed(touches):
        if node not in numbers:
            numbers[node] = min((numbers[user] for user in node.users if user in numbers), default=outer[0])
    return [(numbers[node], node) for node in touches]


def _calls_of(captured: Captured, node: fx.Node, calls: list[int]) -> tuple[int, ...]:
    """The calls of which ``node`` may be a part."""
    keys = set(node.meta.get("nn_module_stack") or ())
    inside = [i for i in calls if captured.calls[i].key in keys]
    return tuple(inside or calls)


def _within(captured: Captured, inner: int, outer: int) -> bool:
    one, other = captured.calls[inner], captured.calls[outer]
    return other.begins < one.begins and one.ends < other.ends


# Backward ------------------------------------------------------------------------------------------------------------


def _backward(
    graph: fx.Graph, plan: GraphPlan, order: fx.Node, places: dict[Bucket, list[fx.Node]]
) -> list[Event]:  # fmt: skip
    captured = plan.captured
    turns = captured.backs()
    values: dict[int, dict[fx.Node, None]] = {number: {} for number in turns}
    events = {number: Event(BACK, ()) for number in turns}
    adds = _take_gradients(graph, plan, order)
    for bucket in dict.fromkeys(b for call in captured.calls for b in call.buckets):
        touches = [node for place in places.get(bucket, ()) for node in readers(place)]
        for number in turns:
            if bucket in captured.calls[number].buckets:
                values[number].update(dict.fromkeys(places.get(bucket, ())))
        brought, over = captured.brought_at(bucket), captured.over_at(bucket)
        if brought is not None:  # its backward reads parameters, and gives their gradients
            events[brought].before += [*touches, *adds[bucket]]
        if over is not None:
            events[over].after += [*touches, *adds[bucket]]
            values[over].update(dict.fromkeys(places.get(bucket, ())))
    for number, event in events.items():
        event.args = order, list(values[number]), number
    return [events[number] for number in turns]


def _take_gradients(graph: fx.Graph, plan: GraphPlan, order: fx.Node) -> dict[Bucket, list[fx.Node]]:
    """Gradients of parameters go to their buckets as soon as they are there, and are no outputs any more."""
    values = values_of(graph)
    if len(values) != len(plan.names):
        raise NotWholeError(f"its backward returns {len(values)} gradients for {len(plan.names)} inputs")
    taken: dict[Bucket, list[fx.Node]] = defaultdict(list)
    for number, (bucket, slot) in plan.captured.inputs.items():
        value = values[number]
        if not isinstance(value, fx.Node) or bucket.gradients is None:
            continue
        values[number] = None
        where = value if value.op != "placeholder" else order
        with graph.inserting_after(where):
            taken[bucket].append(graph.call_function(ACCUMULATE, (order, value, bucket.index, slot)))
    plan.taken = frozenset((node.args[2], node.args[3]) for nodes in taken.values() for node in nodes)  # type: ignore[misc]
    return_values(graph, values)
    return taken
