"""What a pass has done to a graph: nodes that came, went and moved, memory, where communication begins."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from zoo.compile.ops import ACCUMULATE, BACK, ENTER
from zoo.compile.plan import GraphPlan
from zoo.compile.profile import peak_bytes

__all__ = ["Look", "look"]


@dataclass(frozen=True)
class Look:
    """A graph at one time.

    Attributes:
        nodes: (name, what it calls), in order. peak_bytes: see :class:`~zoo.compile.profile.Segment`.
        starts: nodes at which the runtime may begin communication.
    """

    nodes: tuple[tuple[str, str], ...]
    peak_bytes: int
    starts: int

    def until(self, after: Look) -> str:
        """What is between this and a later one."""
        mine, theirs = dict(self.nodes), dict(after.nodes)
        parts = [f"{len(self.nodes)} → {len(after.nodes)} nodes"]
        for sign, some, others in (("+", theirs, mine), ("-", mine, theirs)):
            found = Counter(what for name, what in some.items() if name not in others)
            parts += [f"{sign}{count} {what}" for what, count in found.most_common()]
        order = {name: place for place, name in enumerate(mine)}
        if moved := _moved([order[name] for name in theirs if name in order]):
            parts.append(f"{moved} moved")
        parts.append(f"peak of values {_change(self.peak_bytes, after.peak_bytes)} bytes")
        parts.append(f"starts {_change(self.starts, after.starts)}")
        return ", ".join(parts)


def look(graph: fx.GraphModule, plan: GraphPlan) -> Look:
    """A graph as it is now."""
    nodes = tuple((node.name, _called(node)) for node in graph.graph.nodes)
    starts = sum(node.target in (ENTER, BACK, ACCUMULATE) for node in graph.graph.nodes)
    return Look(nodes, peak_bytes(graph, plan), starts)


def _called(node: fx.Node) -> str:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(target, "__name__", node.op)


def _moved(places: Sequence[int]) -> int:
    """How many at least have another place among the others: all but the longest run that rises."""
    ends: list[int] = []  # the smallest last place of a rising run of each length
    for place in places:
        at = bisect.bisect_left(ends, place)
        ends[at : at + 1] = [place]
    return len(places) - len(ends)


def _change(before: int, after: int) -> str:
    return f"{before:,}" if before == after else f"{before:,} → {after:,}"
