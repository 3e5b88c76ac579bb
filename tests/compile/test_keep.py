"""What forward keeps for backward, whatever views and copies of a weight are; and weights that are written to."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from zoo.compile import PassContract, compile_whole, register_compile_pass
from zoo.compile.capture import alias_of
from zoo.compile.passes.keep import keep_between_units
from zoo.compile.plan import return_values, values_of
from zoo.zero import ZeroOptimizer

WIDTH = 4
aten, prims = torch.ops.aten, torch.ops.prims
SHAPE = [WIDTH, WIDTH]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Three(nn.Module):
    """Layers whose weights backward reads."""

    def __init__(self, trains: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second.weight.requires_grad_(trains)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x))))).square().sum()


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, stage: int, schedule: Any = None, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Losses of steps and the parameters after them, and the graph."""
    torch._dynamo.reset()
    optimizer = ZeroOptimizer(
        model, stage=stage, lr=0.1, optimizer=torch.optim.SGD, param_persistence_threshold=0, reduce_bucket_size=1,
        max_live_parameters=0,
    )  # fmt: skip
    given = {} if schedule is True else {"schedule": schedule}
    whole = compile_whole(optimizer.sharded, **{"backend": "aot_eager", **options, **given}) if schedule else None
    found = []
    for step in range(3):
        loss = model(batch(step))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(value for _, value in sorted(optimizer.consolidated_parameters().items()))], whole


# Each gives back what it is given, in its memory or copied.
WAYS: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {
    "view": [(aten.view.default, (SHAPE,))], "reshape": [(aten.reshape.default, (SHAPE,))],
    "_unsafe_view": [(aten._unsafe_view.default, (SHAPE,))], "t": [(aten.t.default, ())] * 2,
    "transpose": [(aten.transpose.int, (0, 1))] * 2, "permute": [(aten.permute.default, ([1, 0],))] * 2,
    "expand": [(aten.expand.default, (SHAPE,))], "detach": [(aten.detach.default, ())],
    "alias": [(aten.alias.default, ())], "lift": [(aten.lift.default, ())],
    "_reshape_alias": [(aten._reshape_alias.default, (SHAPE, [WIDTH, 1]))],
    "as_strided": [(aten.as_strided.default, (SHAPE, [WIDTH, 1]))],
    "split": [(aten.split.Tensor, (WIDTH,)), (operator.getitem, (0,))],
    "unsafe_split": [(aten.unsafe_split.Tensor, (WIDTH,)), (operator.getitem, (0,))],
    "unsafe_split_with_sizes": [(aten.unsafe_split_with_sizes.default, ([WIDTH],)), (operator.getitem, (0,))],
    "unbind": [(aten.unsqueeze.default, (0,)), (aten.unbind.int, ()), (operator.getitem, (0,))],
    "select": [(aten.unsqueeze.default, (0,)), (aten.select.int, (0, 0))],
    "squeeze": [(aten.unsqueeze.default, (1,)), (aten.squeeze.dim, (1,))],
    "slice": [(aten.slice.Tensor, (0, 0, WIDTH))], "to": [(aten.to.dtype, (torch.float32,))],
    "view of": [(prims.view_of.default, ())], "clone": [(aten.clone.default, ())],
    "_to_copy": [(aten._to_copy.default, ())], "lift_fresh_copy": [(aten.lift_fresh_copy.default, ())],
    "convert": [(prims.convert_element_type.default, (torch.float32,))],
    "view_copy": [(aten.view_copy.default, (SHAPE,))], "permute_copy": [(aten.permute_copy.default, ([0, 1],))],
    "split_copy": [(aten.split_copy.Tensor, (WIDTH,)), (operator.getitem, (0,))],
    "copy, then view": [(aten.clone.default, ()), (aten._unsafe_view.default, (SHAPE,))],
}  # fmt: skip


def kept_as(way: str) -> Callable[[Any, Any], Any]:
    """A pass by which weights are kept as torch might have kept them."""

    def apply(graph: Any, plan: Any) -> Any:
        parameters, nodes = plan.parameters(graph.graph), graph.graph
        if plan.backward:
            for place in list(parameters):
                if place.meta["val"].dim() == 2:
                    renamed(nodes, place, f"kept_{place.name}")
            plan.ends[True] = [n.name for n in nodes.nodes if n.op == "placeholder"], plan.ends[True][1]
            return graph
        values = values_of(nodes)
        for i, place in enumerate(values[plan.num_returned :], plan.num_returned):
            if place in parameters and place.meta["val"].dim() == 2:
                values[i] = made_by(nodes, place, WAYS[way])
        return_values(nodes, values)
        return graph

    return apply


def made_by(graph: fx.Graph, place: fx.Node, steps: list[tuple[Any, tuple[Any, ...]]]) -> fx.Node:
    made, last = place, next(n for n in reversed(graph.nodes) if n.op == "output")
    for number, (target, args) in enumerate(steps, 1):
        name = f"kept_{place.name}" if number == len(steps) else None
        with graph.inserting_before(last):
            node = graph.create_node("call_function", target, (made, *args), name=name)
        node.meta["val"] = target(made.meta["val"], *args)
        made = node
    return made


def renamed(graph: fx.Graph, place: fx.Node, name: str) -> None:
    with graph.inserting_before(place):
        other = graph.create_node("placeholder", name, name=name)
    other.meta = dict(place.meta)
    place.replace_all_uses_with(other)
    graph.erase_node(place)


@pytest.fixture(scope="module")
def right() -> list[torch.Tensor]:
    return train(Three(), 3)[0]


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_is_kept_as_itself_whatever_is_made_of_it(way: str, right: list[torch.Tensor]) -> None:
    register_compile_pass("kept_as_in_tests", kept_as(way))
    found, whole = train(Three(), 3, [(0, ["kept_as_in_tests", "keep", "place"])])
    assert not whole.reasons
    assert len(whole.plans[0].remade) >= 2
    assert all(map(torch.equal, found, right))


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
def test_one_that_is_kept_otherwise_is_found(way: str, right: list[torch.Tensor]) -> None:
    register_compile_pass("kept_as_in_tests", kept_as(way))
    register_compile_pass("keeps_nothing_in_tests", lambda graph, plan: graph, PassContract(adds=frozenset({"kept"})))
    schedule = [(0, ["keeps_nothing_in_tests", "kept_as_in_tests", "place"])]
    found, whole = train(Three(), 3, schedule)
    assert "'place' has broken the graph" in whole.reasons[True, True]
    assert all(map(torch.equal, found, right))


def given(schema: Any, value: torch.Tensor, size: list[int], number: int) -> tuple[list[Any], dict[str, Any]] | None:
    """Arguments that an operation of one tensor may take."""
    if not schema.arguments or str(schema.arguments[0].type) != "Tensor":
        return None
    known: dict[str, Any] = {
        "List[int]": size,
        "int": number,
        "Tensor": value,
        "bool": False,
        "float": 1.0,
        "number": 1,
    }
    args: list[Any] = [value]
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments[1:]:
        kind = str(argument.type)
        if argument.has_default_value():
            continue
        if kind not in known and not kind.startswith("Optional"):
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = known.get(kind)
        else:
            args.append(known.get(kind))
    return args, kwargs


def operations() -> Iterator[Any]:
    """All that torch leaves in a graph and that write to nothing."""
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        composed = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if space in ("aten", "prims") and not composed:
            packet, _, overload = rest.partition(".")
            found = getattr(getattr(getattr(torch.ops, space), packet, None), overload or "default", None)
            if found is not None and not found._schema.is_mutable:
                yield found


def shares(operation: Any) -> bool:
    """Whether what it gives, of some arguments, is in the memory of what it is given."""
    values = [torch.empty(4, 4, device="meta"), torch.empty(16, device="meta"),
              torch.empty(4, 4, dtype=torch.complex64, device="meta")]  # fmt: skip
    for value, size, number in itertools.product(values, ([4, 4], [16], [0], [0, 1], [4]), (0, 1, 4)):
        arguments = given(operation._schema, value, size, number)
        if arguments is None:
            return False
        try:
            out = operation(*arguments[0], **arguments[1])
        except Exception:
            continue
        made = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]
        stored = [t.untyped_storage()._cdata for t in made if t.is_meta and t.layout is torch.strided]
        if value.untyped_storage()._cdata in stored:
            return True
    return False


NOT_IN_GRAPHS = {"aten.native_dropout.default", "aten.set.source_Tensor", "aten._test_parallel_materialize.default"}
"""Dropout that drops nothing is left out when a model is traced; the others nobody calls."""


@pytest.mark.dear
def test_every_operation_that_gives_memory_of_its_input_is_known() -> None:
    graph = fx.Graph()
    place = graph.placeholder("weight")
    found = [operation for operation in operations() if shares(operation)]
    assert len(found) > 30
    unknown = [str(one) for one in found if not alias_of(graph.call_function(one, (place,)))]
    assert set(unknown) <= NOT_IN_GRAPHS


# Weights that are written to -----------------------------------------------------------------------------------------


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda w: w.clone(), "cast": lambda w: w.to(torch.float64).float(), "both": lambda w: w.t().clone().t(),
}  # fmt: skip


class Writes(Three):
    """It reads a weight through a copy, and writes to it before or afterwards."""

    def __init__(self, read: str, first: bool, trains: bool) -> None:
        super().__init__(trains)
        self.read, self.before = READS[read], first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.second.weight
        if self.before:
            with torch.no_grad():
                weight.mul_(0.5)
        x = torch.tanh(self.first(x)) @ self.read(weight)
        with torch.no_grad():
            weight.lerp_(torch.ones_like(weight), 0.25)
        return self.last(x).square().sum()


@pytest.mark.dear
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("read", READS)
def test_a_weight_that_is_copied_and_then_written_to_is_used_as_it_was(read: str, trains: bool, stage: int) -> None:
    for first in (False, True):
        right, _ = train(Writes(read, first, trains), stage)
        found, whole = train(Writes(read, first, trains), stage, True)
        assert not whole.reasons
        assert all(map(torch.equal, found, right))


class Clamps(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_writing_to_a_weight_that_is_released_is_said_as_without_a_graph() -> None:
    model = nn.Sequential(Clamps(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = ZeroOptimizer(model, stage=3, lr=0.1, param_persistence_threshold=0, max_live_parameters=0)
    whole = compile_whole(optimizer.sharded, "aot_eager")
    with torch.no_grad():
        model(batch(0))
    optimizer.backward(model(batch(0)).sum())
    assert all("the model writes to '0.weight'" in whole.reasons[True, grad] for grad in (True, False))
    with pytest.raises(RuntimeError, match=r"0\.weight was written to in place while it was gathered"):
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("trains", [False, True])
def test_a_weight_that_is_cast_and_then_written_to_with_code_of_inductor(trains: bool) -> None:
    right, _ = train(Writes("cast", False, trains), 1)
    found, whole = train(Writes("cast", False, trains), 1, True, backend="inductor")
    assert not whole.reasons
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("views", [[], ["_unsafe_view"], ["transpose", "unsafe_split"]])
def test_what_a_unit_gives_is_kept_where_it_gives_a_view(views: list[str]) -> None:
    graph = fx.Graph()
    inside: Any = {"nn_module_stack": {"unit": ("", nn.Module)}}
    made = first = graph.call_function(aten.gelu.default, (graph.placeholder("x"),))
    made.meta = dict(inside)
    for target, args in (step for way in views for step in WAYS[way]):
        made = graph.call_function(target, (made, *args))
        made.meta = dict(inside)
    other = graph.call_function(aten.sum.default, (made,))
    graph.output((other,))
    plan: Any = SimpleNamespace(captured=SimpleNamespace(units={"unit": None}))
    keep_between_units(fx.GraphModule(nn.Module(), graph), plan)
    kept = [node for node in graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    assert kept == [first]


class Table(nn.Module):
    """It gives its parameter in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8, dtype=dtype))

    def forward(self) -> torch.Tensor:
        return self.table.to(torch.float32 if self.table.dtype is torch.bfloat16 else torch.bfloat16)


class Scaled(nn.Module):
    """The gradient of what is scaled has the shape and the dtype of the table, which is read last where it is made."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.first, self.last = Table(dtype), nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last((torch.tanh(self.first(x)) * self.table()).to(x.dtype))
        return out.float().square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_code_of_inductor_writes_nothing_over_a_parameter(dtype: torch.dtype, stage: int) -> None:
    """Two steps without an update: all values are what they were."""
    torch._dynamo.reset()
    model = Scaled(dtype)
    right = model.table.table.detach().clone()
    optimizer = ZeroOptimizer(model, stage=stage, lr=0.0, optimizer=torch.optim.SGD)
    whole = compile_whole(optimizer.sharded)
    losses = []
    for _ in range(2):
        loss = model(torch.linspace(-1, 1, 64, dtype=dtype).reshape(8, 8))
        optimizer.backward(loss)
        losses.append(loss.item())
    assert whole.plans[0].remade
    assert losses[0] == losses[1]
    assert torch.equal(optimizer.consolidated_parameters()["table.table"], right)
