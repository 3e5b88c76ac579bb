"""What a traced model is: which inputs of the graph are parameters, and which units run in which order."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from zoo.compile.ops import MARK
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
        called: backward comes back through its output. grad: gradients were enabled where it ended.
    """

    unit: Unit
    key: str
    buckets: tuple[Bucket, ...]
    begins: int
    ends: int = -1
    called: bool = False
    grad: bool = False


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
        begins = min((call.begins for call in self.calls if bucket in call.buckets), default=-1)
        return next((number for number in self.backs() if self.calls[number].ends < begins), None)


def capture(graph: fx.GraphModule, inputs: Sequence[Any], runtime: Runtime) -> Captured:
    """Read a graph as torch.compile traces it, and take the marks out of it.

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
    _Reader(found, runtime).read(graph, parameters)
    return found


class _Reader:
    """Goes through the nodes as they run, and notes where units begin and end: where their hooks have left marks."""

    def __init__(self, found: Captured, runtime: Runtime) -> None:
        self._found, self._units = found, runtime.units
        self._open: list[int] = []  # numbers of calls
        self._nodes: dict[int, list[fx.Node]] = {}  # by call, those inside of it
        self._gives: dict[int, bool] = {}  # by call, whether something that it returns requires a gradient

    def read(self, graph: fx.GraphModule, parameters: dict[fx.Node, Bucket]) -> None:
        root = self._units[0]
        self._begin(root, "")
        self._walk(graph, parameters)
        if self._open != [0]:
            raise NotWholeError("a forward in it does not come to its end")
        self._end(grad=self._found.trains)
        if any(n.target is MARK for m in graph.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes):
            raise NotWholeError("a unit runs in a part of it that may run or not (torch.cond)")
        for number, call in enumerate(self._found.calls):
            gives = self._gives.get(number)
            if gives is None:
                gives = _requires_grad_outside(self._nodes.get(number, []))
            held = call.grad and bool(call.unit.partitioned and call.unit.gradients)
            call.called = self._found.trains and (gives or held)

    def _walk(self, graph: fx.GraphModule, parameters: dict[fx.Node, Bucket]) -> None:
        for node in list(graph.graph.nodes):
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            if node.target is MARK:
                self._turn(node)
                graph.graph.erase_node(node)
                continue
            for number in self._open:
                self._nodes.setdefault(number, []).append(node)
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
        graph.recompile()

    def _turn(self, node: fx.Node) -> None:
        """To where a mark is. What hooks of the user compute around the model's own call belongs to that, too."""
        outputs: Any
        outputs, number, begins, grad, known = node.args
        unit = self._units[int(str(number))]
        if begins and unit.name:
            stack = node.meta.get("nn_module_stack") or {}
            if not stack:
                raise NotWholeError(f"torch does not say what belongs to {unit.name!r}")
            self._found.units[next(reversed(stack))] = unit
            self._begin(unit, next(reversed(stack)))
        elif begins:
            if len(self._open) > 1:
                raise NotWholeError("it calls itself")
        else:
            if self._found.calls[self._open[-1]].unit is not unit:
                raise NotWholeError(f"{unit.name!r} ends while something in it has not")
            if known:
                values = (value.meta.get("example_value") for value in outputs)
                self._gives[self._open[-1]] = any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
            if unit.name:
                self._end(grad=bool(grad))

    def _begin(self, unit: Unit, key: str) -> None:
        number = len(self._found.calls)
        self._found.calls.append(Call(unit, key, tuple(unit.recorded), begins=len(self._found.events)))
        self._found.events.append((number, True))
        self._open.append(number)

    def _end(self, *, grad: bool) -> None:
        number = self._open.pop()
        call = self._found.calls[number]
        call.ends, call.grad = len(self._found.events), grad
        self._found.events.append((number, False))

    def _use(self, bucket: Bucket) -> None:
        if not bucket.partitioned:
            return
        units = [self._found.calls[number].unit for number in self._open]
        if not any(bucket in unit.partitioned for unit in units):
            # The hooks find such a parameter when it is touched, and all ranks agree on who uses it then.
            raise NotWholeError(
                f"parameters of {bucket.label} are used in {units[-1].name or 'the model'!r}, which is not known to "
                "use them yet", again=True,
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


def _body(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, Sequence[Any]] | None:
    """The graph that a node runs (checkpointing), and what it is given."""
    first = node.args[0] if node.args else None
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or not isinstance(first, fx.Node):
        return None
    if first.op != "get_attr":
        return None
    body = getattr(graph, str(first.target), None)
    if not isinstance(body, fx.GraphModule):
        return None
    return body, [a for a in node.args[1:] if not (isinstance(a, fx.Node) and a.op == "get_attr")]


_ATEN = torch.ops.aten
_UNSAID: frozenset[Any] = frozenset(
    {_ATEN._unsafe_view.default, _ATEN.unsafe_split.Tensor, _ATEN.unsafe_split_with_sizes.default, _ATEN.lift.default}
)
"""Views of which autograd is not to know: their schemas do not say it."""
CASTS: frozenset[Any] = frozenset(
    {_ATEN._to_copy.default, torch.ops.prims.convert_element_type.default, _ATEN.to.dtype}
)
"""What gives a tensor in another dtype."""
_COPIES = CASTS | {_ATEN.clone.default, _ATEN.lift_fresh_copy.default}


def is_view(target: Any) -> bool:
    """Whether what an operation gives is memory of what it is given."""
    if target in _UNSAID:
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def alias_of(node: fx.Node) -> bool:
    """Whether what a node gives is memory of what it is given."""
    return is_view(_made_by(node))


def copies(node: fx.Node) -> bool:
    """Whether a node gives what it is given, in another shape or dtype perhaps, in other memory."""
    target = _made_by(node)
    return target in _COPIES or torch.Tag.view_copy in getattr(target, "tags", ())


def writes(node: fx.Node) -> bool:
    """Whether it writes to what it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _made_by(node: fx.Node) -> Any:
    """The operation that gives it; of one of several tensors, the one that gives all of them."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.target


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
