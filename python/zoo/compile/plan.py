"""What passes know of the graph they are given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from zoo.compile.capture import Captured
from zoo.shard.buckets import Bucket

if TYPE_CHECKING:
    from zoo.compile.profile import Segment


class Step(NamedTuple):
    """An operation on what the one before it gave: ``args`` come after that."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


class Remade(NamedTuple):
    """What backward makes again: of which input of the forward graph, how, and that input as torch traced it."""

    source: str
    steps: list[Step]
    value: Any


@dataclass
class GraphPlan:
    """Of a model: what was captured, and what a pass over its forward has to tell those over its backward.

    Attributes:
        captured: of the traced model. names: of the inputs of the forward graph, in order.
        num_returned: the first outputs of the forward graph are the model's; the others are kept for backward.
        remade: by the name of an input of the backward graph that is a parameter although torch meant something that is
            made of it.
        read_last: partitioned buckets that the backward graph reads after its last event.
        ends: by whether it is that of backward, the names of each graph's inputs and how many values it returns, as
            torch has traced it.
        taken: bucket and slot of each gradient that the backward graph takes.
        backward: the graph at hand is that of backward.
        report: what passes have to say, by pass.
        segments: by whether it is that of backward, what each graph will take (:mod:`zoo.compile.profile`).
    """

    captured: Captured
    names: list[str] = field(default_factory=list)
    num_returned: int = 0
    remade: dict[str, Remade] = field(default_factory=dict)
    read_last: frozenset[Bucket] = frozenset()
    ends: dict[bool, tuple[list[str], int]] = field(default_factory=dict)
    taken: frozenset[tuple[int, int]] = frozenset()
    backward: bool = False
    report: dict[str, list[str]] = field(default_factory=dict)
    segments: dict[bool, list[Segment]] = field(default_factory=dict)

    def parameters(self, graph: fx.Graph) -> dict[fx.Node, tuple[Bucket, int]]:
        """The inputs of this graph that are parameters: bucket and slot of each."""
        inputs = {self.names[i]: found for i, found in self.captured.inputs.items()}
        inputs |= {name: inputs[made.source] for name, made in self.remade.items()}
        return {node: inputs[node.name] for node in placeholders(graph) if node.name in inputs}

    def say(self, name: str, what: str) -> None:
        """For the report."""
        self.report.setdefault(name, []).append(what)


def placeholders(graph: fx.Graph) -> Iterator[fx.Node]:
    """The inputs of a graph, in order."""
    return (node for node in graph.nodes if node.op == "placeholder")


def values_of(graph: fx.Graph) -> list[Any]:
    """What it returns, one by one."""
    returned: Any = graph.output_node().args[0]
    return list(returned)


def return_values(graph: fx.Graph, values: list[Any]) -> None:
    """Return these."""
    output = graph.output_node()
    output.args = (tuple(values) if isinstance(output.args[0], tuple) else values,)
