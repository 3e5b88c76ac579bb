"""What a graph will take, from its sizes alone: operations, bytes, the memory of its values; nothing runs.

A *segment* is what a graph computes from one of the runtime's events to the next. Operations of products are torch's
own formulas (``torch.utils.flop_counter``); bytes are those of an ideal kernel, which reads each input and writes each
output once (``zoo.cost.operators``). On a device a node takes

    max(flops / (peak · reached), bytes / (bandwidth · reached)) + launch

seconds (Williams, Waterman and Patterson 2009, "Roofline"). What inductor fuses moves fewer bytes than the sum of its
nodes: seconds of elementwise operations are an upper bound.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zoo.compile.capture import alias_of
from zoo.compile.ops import ACCUMULATE, BACK, ENTER, EVENTS
from zoo.compile.plan import GraphPlan
from zoo.cost import Device, Work, pass_s

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""What hardware files call them."""


@dataclass
class Segment:
    """What is between two events.

    Attributes:
        event: "enter", "leave" or "back", where it begins; "" at the beginning of a graph. call: of a unit.
        work: of its nodes, each with the dtype that it computes in.
        live_bytes: the largest sum, in it, of values that the graph was given or has made, and that it or backward
            still needs. Parameters are not among them, gradients until their bucket has them.
    """

    event: str = ""
    call: int = -1
    work: list[tuple[torch.dtype, Work]] = field(default_factory=list)
    live_bytes: int = 0

    @property
    def total(self) -> Work:
        """Of all nodes."""
        return sum((work for _, work in self.work), start=Work())

    def seconds(self, device: Device) -> float:
        """On a device, by the formula above.

        Raises:
            HardwareError: the device states no FLOP/s for a dtype in which something is multiplied.
        """
        found = 0.0
        for dtype, work in self.work:
            flops_s = 0.0
            if work.flops:
                name = DTYPES.get(dtype, str(dtype).removeprefix("torch."))
                flops_s = work.flops / (device.peak(name) * device.reached)
            found += max(flops_s, pass_s(device, work.read_bytes + work.written_bytes)) + device.launch_s
        return found


def profile(graph: fx.GraphModule, plan: GraphPlan) -> list[Segment]:
    """The segments of a graph in order; the events are there after the pass "place", and before it there is one.

    Args:
        graph: of forward, or (``plan.backward``) of backward, with the values that torch traced (``meta["val"]``).
    """
    names = {target: name for name, target in zip(("enter", "back"), (ENTER, BACK), strict=True)}
    segments = [Segment()]
    live = _Live(graph.graph, plan)
    for node in graph.graph.nodes:
        if node.target in EVENTS:
            segments.append(Segment(names.get(node.target, "leave"), node.args[2]))
        elif node.op == "call_function" and node.target is not ACCUMULATE and not _shares(node):
            segments[-1].work.append(_work(node))
        segments[-1].live_bytes = max(segments[-1].live_bytes, live.after(node))
    return segments


def peak_bytes(graph: fx.GraphModule, plan: GraphPlan) -> int:
    """The largest :attr:`Segment.live_bytes`."""
    live = _Live(graph.graph, plan)
    return max((live.after(node) for node in graph.graph.nodes), default=0)


class _Live:
    """Goes over a graph in its order, and knows which values are needed."""

    def __init__(self, graph: fx.Graph, plan: GraphPlan) -> None:
        self._parameters = set(plan.parameters(graph))
        self._now = 0
        self._ends: dict[fx.Node, list[int]] = {}  # by the node that is the last to need something: its bytes
        last: dict[fx.Node, fx.Node] = {}
        output = graph.output_node()
        for node in graph.nodes:
            for used in node.all_input_nodes:
                last[_owner(used)] = node
        for node, end in last.items():
            size = self._size(node)
            if size and end is not output:
                self._ends.setdefault(end, []).append(size)

    def _size(self, node: fx.Node) -> int:
        if node in self._parameters or node.op == "get_attr" or _shares(node):
            return 0
        return sum(map(bytes_of, _tensors(node.meta.get("val"))))

    def after(self, node: fx.Node) -> int:
        """Bytes while ``node`` runs; it comes once, in order."""
        if node.users or node.op == "output":
            self._now += self._size(node) if node.op != "output" else 0
        here = self._now
        self._now -= sum(self._ends.pop(node, ()))
        return here


def _shares(node: fx.Node) -> bool:
    """Whether its memory is that of another node."""
    return node.target is operator.getitem or alias_of(node)


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory it is."""
    while _shares(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def bytes_of(value: torch.Tensor) -> int:
    """Of the elements of a tensor; a size that may change counts as it was when it was traced."""
    found = value.element_size()
    for size in value.shape:
        found *= _number(size)
    return found


def _number(size: Any) -> int:
    return size if type(size) is int else int(size.node.hint or 0)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _work(node: fx.Node) -> tuple[torch.dtype, Work]:
    """What a node does, and in which dtype."""
    from torch.utils.flop_counter import flop_registry

    value = node.meta.get("val")
    read = [t for used in node.all_input_nodes for t in _tensors(used.meta.get("val"))]
    floats = [t.dtype for t in (*read, *_tensors(value)) if t.dtype.is_floating_point]
    dtype = floats[0] if floats else torch.float32
    written = sum(map(bytes_of, _tensors(value)))
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    macs = 0
    if formula is not None and "val" in node.meta and all("val" in used.meta for used in node.all_input_nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        macs = _number(formula(*args, **kwargs, out_val=value)) // 2
    return dtype, Work(macs=macs, read_bytes=sum(map(bytes_of, read)), written_bytes=written)
