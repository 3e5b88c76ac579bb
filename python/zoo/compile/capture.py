"""What a traced model is: which inputs of the graph are parameters, and which units run in which order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from zoo.shard.buckets import bucket_of

if TYPE_CHECKING:
    from zoo.shard.buckets import Bucket
    from zoo.shard.runtime.contexts import Unit
    from zoo.shard.runtime.hooks import Runtime


class NotWholeError(Exception):
    """This model, or this call of it, is no whole graph: the hooks carry it. The message says why.

    Attributes:
        again: another call of it may be.
    """

    def __init__(self, why: str, *, again: bool = False) -> None:
        super().__init__(why)
        self.again = again


@dataclass
class Call:
    """One call of a unit in the graph.

    Attributes:
        unit: of the runtime. key: what the compiler calls it. buckets: those that it needs whole.
        begins, ends: places in the order of events.
        called: backward comes back through its output.
    """

    unit: Unit
    key: str
    buckets: tuple[Bucket, ...]
    begins: int
    ends: int = -1
    called: bool = False


@dataclass
class Captured:
    """A traced model.

    Attributes:
        inputs: by the number of an input of the graph, the bucket and the slot of the parameter that it is.
        calls: of units, in the order in which they begin.
        events: (number of the call, whether it begins), in order.
        units: by what the compiler calls it, each unit that runs. trains: the graph is one with gradients.
    """

    inputs: dict[int, tuple[Bucket, int]]
    calls: list[Call] = field(default_factory=list)
    events: list[tuple[int, bool]] = field(default_factory=list)
    units: dict[str, Unit] = field(default_factory=dict)
    trains: bool = False

    def in_backward(self) -> list[int]:
        """The calls that backward comes to, the latest that ended first."""
        return sorted((i for i, call in enumerate(self.calls) if call.called), key=lambda i: -self.calls[i].ends)

    def backs(self) -> list[int]:
        """The same without the model itself, to whose call a hook on its output goes."""
        return [number for number in self.in_backward() if number != 0]

    def brought_at(self, bucket: Bucket) -> int | None:
        """The call in whose backward a bucket is gathered first; None: before the graph, or never."""
        calls = [number for number in self.in_backward() if bucket in self.calls[number].buckets]
        return calls[0] if calls and calls[0] != 0 else None

    def over_at(self, bucket: Bucket) -> int | None:
        """The call at whose backward nothing needs a bucket any more: the latest that ended before the first that uses
        it began; None: after the graph."""
        begins = min(call.begins for call in self.calls if bucket in call.buckets)
        return next((number for number in self.backs() if self.calls[number].ends < begins), None)


def capture(graph: fx.GraphModule, inputs: Sequence[Any], runtime: Runtime, model: nn.Module) -> Captured:
    """Read a graph as torch.compile traces it.

    Raises:
        NotWholeError: something in it cannot be carried by a graph.
    """
    found = Captured({}, trains=torch.is_grad_enabled())
    mine = set(runtime.buckets)
    for number, value in enumerate(inputs):
        bucket = bucket_of(value)
        if bucket is not None:
            if bucket not in mine:
                raise NotWholeError("a parameter in it belongs to another model")
            found.inputs[number] = bucket, value._zoo_slot
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    parameters = {places[i]: bucket for i, (bucket, _) in found.inputs.items()}
    _Reader(found, runtime, model).read(graph, parameters)
    return found


class _Reader:
    """Goes through the nodes as they run, and notes where units begin and end."""

    def __init__(self, found: Captured, runtime: Runtime, model: nn.Module) -> None:
        self._found, self._model = found, model
        self._units = {unit.module: unit for unit in runtime.hooked.values()}
        self._modules: dict[str, nn.Module | None] = {}
        self._open: list[tuple[Unit, str, int]] = []  # unit, which call of it, its number
        self._nodes: dict[int, list[fx.Node]] = {}  # by call, those inside of it

    def read(self, graph: fx.GraphModule, parameters: dict[fx.Node, Bucket]) -> None:
        root = self._units.get(self._model)
        if root is None:
            raise NotWholeError("the model itself is no unit")
        self._begin(root, "")
        self._walk(graph, parameters)
        while self._open:
            self._end()
        for number, nodes in self._nodes.items():
            call = self._found.calls[number]
            gives = _requires_grad_outside(nodes)
            call.called = self._found.trains and (gives or bool(call.unit.partitioned and call.unit.gradients))

    def _walk(self, graph: fx.GraphModule, parameters: dict[fx.Node, Bucket]) -> None:
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            self._turn_to(node)
            for call in self._open:
                self._nodes.setdefault(call[2], []).append(node)
            inside = _body(graph, node)
            if inside is not None:
                body, arguments = inside
                given = [n for n in body.graph.nodes if n.op == "placeholder"]
                pairs = zip(given, arguments, strict=False)
                self._walk(body, {inner: parameters[outer] for inner, outer in pairs if outer in parameters})
                continue
            for used in node.all_input_nodes:
                if used in parameters:
                    self._use(parameters[used])

    def _turn_to(self, node: fx.Node) -> None:
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return
        wanted = [("", self._units[self._model])]
        for key, value in stack.items():
            unit = self._unit_at(value[0] if isinstance(value, tuple) else value)
            if unit is not None and unit is not wanted[0][1]:
                wanted.append((key, unit))
                self._found.units[key] = unit
        same = 0
        while same < min(len(wanted), len(self._open)):
            unit, key, _ = self._open[same]
            if (key, unit) != wanted[same] and same > 0:
                break
            same += 1
        while len(self._open) > same:
            self._end()
        for key, unit in wanted[same:]:
            self._begin(unit, key)

    def _unit_at(self, path: str) -> Unit | None:
        if path not in self._modules:
            self._modules[path] = _submodule(self._model, path)
        module = self._modules[path]
        return self._units.get(module) if module is not None else None

    def _begin(self, unit: Unit, key: str) -> None:
        number = len(self._found.calls)
        self._found.calls.append(Call(unit, key, tuple(unit.recorded), begins=len(self._found.events)))
        self._found.events.append((number, True))
        self._open.append((unit, key, number))

    def _end(self) -> None:
        _, _, number = self._open.pop()
        self._found.calls[number].ends = len(self._found.events)
        self._found.events.append((number, False))

    def _use(self, bucket: Bucket) -> None:
        if not bucket.partitioned:
            return
        if not any(bucket in unit.partitioned for unit, _, _ in self._open):
            # The hooks find such a parameter when it is touched, and all ranks agree on who uses it then.
            raise NotWholeError(
                f"parameters of {bucket.label} are used in {self._open[-1][0].name or 'the model'!r}, which is not "
                "known to use them yet", again=True,
            )  # fmt: skip


def _requires_grad_outside(nodes: list[fx.Node]) -> bool:
    """Whether something that is computed here, requires a gradient and is used elsewhere."""
    inside = set(nodes)
    for node in nodes:
        value = node.meta.get("example_value")
        values = value if isinstance(value, (tuple, list)) else (value,)
        if any(isinstance(v, torch.Tensor) and v.requires_grad for v in values) and not inside.issuperset(node.users):
            return True
    return False


def _body(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, Sequence[fx.Node]] | None:
    """The graph that a node runs (checkpointing), and what it is given."""
    first = node.args[0] if node.args else None
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or not isinstance(first, fx.Node):
        return None
    if first.op != "get_attr":
        return None
    body = getattr(graph, str(first.target), None)
    if not isinstance(body, fx.GraphModule):
        return None
    return body, [a for a in node.args[1:] if isinstance(a, fx.Node)]


_STEP = re.compile(r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]")


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    """The module of a path as the compiler writes it: ``L['self'].blocks.0``."""
    path = path.partition("@")[0]
    path = re.sub(r"^[LG]\['[^']+'\]", "", path)
    name = _STEP.sub(lambda m: "." + next(filter(None, m.groups())), path).strip(".")
    found: Any = model
    for part in name.split(".") if name else ():
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None


def alias_of(node: fx.Node) -> bool:
    """Whether what a node gives is memory of what it is given."""
    target: Any = node.target
    if target is not None and getattr(target, "__name__", "") == "getitem":
        return isinstance(node.args[0], fx.Node) and alias_of(node.args[0])
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def readers(place: fx.Node) -> Iterator[fx.Node]:
    """What touches the memory of an input of the graph: what makes views of it, and what reads it or them."""
    waiting, seen = [place], set()
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or user in seen:
                continue
            seen.add(user)
            yield user
            if alias_of(user):
                waiting.append(user)
