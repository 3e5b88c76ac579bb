"""What is true of a graph after its passes, whatever they did. Tests look at every graph; it costs one walk."""

from __future__ import annotations

from typing import Any

from torch import fx

from zoo.compile.capture import alias_of, readers
from zoo.compile.ops import ACCUMULATE, BACK, ENTER, EVENTS, LEAVE
from zoo.compile.passes.keep import made_of_parameter
from zoo.compile.plan import GraphPlan, output_of, values_of
from zoo.shard.buckets import Bucket


class PassError(AssertionError):
    """A pass has broken a graph."""


def check(graph: fx.GraphModule, plan: GraphPlan) -> None:
    """Raise :class:`PassError` unless

    * events come in the order of the model's calls, all of them;
    * what reads a partitioned parameter stands between the event that brings it and the one that takes it;
    * no output but the parameter itself is memory of a partitioned parameter, and nothing that forward keeps is a
      parameter in another shape or dtype;
    * the gradients of a bucket are taken before the event at which backward is through with it.
    """
    at = {node: i for i, node in enumerate(graph.graph.nodes)}
    events = {(node.target, node.args[2]): at[node] for node in at if node.target in EVENTS}
    captured = plan.captured
    wanted: list[tuple[Any, Any]] = [(ENTER if begins else LEAVE, number) for number, begins in captured.events]
    wanted = [(BACK, n) for n in captured.backs()] if plan.backward else [e for e in wanted if e != (LEAVE, 0)]
    if list(events) != wanted:
        raise PassError(f"events come as {list(events)}, and not as {wanted}.")
    outputs = set(output_of(graph.graph).all_input_nodes)
    for place, (bucket, slot) in plan.parameters(graph.graph).items():
        if not bucket.partitioned:
            continue
        name, spans = bucket.called(slot), _spans(events, plan, bucket, last=len(at))
        for node in readers(place):
            if node.target not in EVENTS and not any(low < at[node] < high for low, high in spans):
                raise PassError(f"{node} reads {name!r} where it is not here.")
            if node in outputs and alias_of(node):
                raise PassError(f"{node}, in the memory of {name!r}, leaves the graph.")
    kept = values_of(graph.graph)[plan.num_returned :] if not plan.backward else []
    partitioned = {place for place, (bucket, _) in plan.parameters(graph.graph).items() if bucket.partitioned}
    for value in kept:
        if isinstance(value, fx.Node) and value not in partitioned and made_of_parameter(value, partitioned):
            raise PassError(f"{value}, made of a parameter alone, is kept for backward.")
    buckets = {bucket.index: bucket for call in captured.calls for bucket in call.buckets}
    for node in at:
        if node.target is ACCUMULATE:
            over = captured.over_at(buckets[node.args[2]]) if node.args[2] in buckets else None
            if not plan.backward or (over is not None and at[node] > events[BACK, over]):
                raise PassError(f"{node} takes a gradient when backward is through with its bucket.")


def _spans(events: dict[Any, int], plan: GraphPlan, bucket: Bucket, *, last: int) -> list[tuple[int, int]]:
    """Where the parameters of a bucket are here, in places of nodes."""
    captured = plan.captured
    if plan.backward:
        brought, over = captured.brought_at(bucket), captured.over_at(bucket)
        return [(-1 if brought is None else events[BACK, brought], last if over is None else events[BACK, over])]
    calls = [number for number, call in enumerate(captured.calls) if bucket in call.buckets]
    return [(events[ENTER, number], events.get((LEAVE, number), last)) for number in calls]
