"""Puts a node that has an effect to where the order of events allows it, and moves others as little as possible."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zoo.compile.capture import NotWholeError, writes
from zoo.compile.ops import ACCUMULATE


@dataclass
class Event:
    """A node that will be put into a graph.

    Attributes:
        target, args: of the node; its inputs are placeholders, or nodes of ``after``.
        before: nodes that come after it. after: nodes that come before it.
    """

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    before: list[fx.Node] = field(default_factory=list)
    after: list[fx.Node] = field(default_factory=list)


def place(graph: fx.Graph, events: Sequence[Event]) -> list[fx.Node]:
    """Put ``events`` into a graph, each as late as what comes after it allows, in their order. Their nodes.

    Other nodes keep their order but for what has to come before or after an event.

    Raises:
        NotWholeError: there is no such order.
    """
    nodes = list(graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    output = len(nodes) - 1
    times = _times(events, at, output)
    first = next((node for node in nodes if node.op != "placeholder"), nodes[-1])
    made: list[fx.Node] = []
    with graph.inserting_before(first):
        for event in events:
            made.append(graph.call_function(event.target, event.args))
    after: dict[fx.Node, list[fx.Node]] = {node: list(node.all_input_nodes) for node in (*nodes, *made)}
    rank = {**{node: float(i) for node, i in at.items()}, **dict(zip(made, times, strict=True))}
    for event, node in zip(events, made, strict=True):
        after[node] += event.after
        for later in event.before:
            after[later].append(node)
    _chain(made, after)
    for belongs in (_is_random, _writes):
        _chain((n for n in nodes if belongs(n)), after)
    _chain((n for n in nodes if n.op == "placeholder"), after)
    after[nodes[-1]] += [*nodes[:-1], *made]
    order = _sorted(after, rank)
    for node in order:  # each goes to the end in turn
        graph._root.prepend(node)
    graph.lint()
    return made


def _times(events: Sequence[Event], at: dict[fx.Node, int], output: int) -> list[float]:
    """Where each event would stand: right before what waits for it, or a later event."""
    latest, times = output - 0.5, [0.0] * len(events)
    for i in range(len(events) - 1, -1, -1):
        latest = min([latest, *(at[node] - 0.5 for node in events[i].before)])
        times[i] = latest
    return times


def _is_random(node: fx.Node) -> bool:
    """Whether it draws numbers: what it gives depends on what has drawn before it."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _writes(node: fx.Node) -> bool:
    """Whether it writes to its inputs. Gradients that are taken come in any order."""
    return writes(node) and node.target is not ACCUMULATE


def _chain(nodes: Iterable[fx.Node], after: dict[fx.Node, list[fx.Node]]) -> None:
    before = None
    for node in nodes:
        if before is not None:
            after[node].append(before)
        before = node


def _sorted(after: dict[fx.Node, list[fx.Node]], rank: dict[fx.Node, float]) -> list[fx.Node]:
    """Nodes in an order that has each after those that it waits for, and otherwise by rank."""
    waits = {node: len(set(needed)) for node, needed in after.items()}
    opens: dict[fx.Node, list[fx.Node]] = {node: [] for node in after}
    for node, needed in after.items():
        for other in set(needed):
            opens[other].append(node)
    numbers = {node: i for i, node in enumerate(after)}
    ready = [(rank[node], numbers[node], node) for node, count in waits.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, _, node = heapq.heappop(ready)
        order.append(node)
        for other in opens[node]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, (rank[other], numbers[other], other))
    if len(order) < len(after):
        raise NotWholeError("what its backward computes comes in another order than its forward")
    return order
