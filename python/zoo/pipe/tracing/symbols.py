"""A forward as a graph: ``torch.fx`` with submodules as leaves, and symbols that know their shapes from an example.

What decides a branch or the length of a loop is asked for once, of the example, and becomes a *guard*: a node that asks
again in each forward, and raises where the answer is another one. Values of tensors decide nothing: that is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import linecache
import operator
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from zoo.pipe.tracing.leaves import FACTORIES, IN_PLACE, Refused, has_symbols, leaf_functions, unchanged
from zoo.pipe.tracing.regions import Regions

__all__ = ["Recorded", "Refused", "filled", "guard", "record"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a trace leaves.

    Attributes:
        graph: its nodes; ``meta["path"]`` says in which module that was traced through a node was made.
        constants: what nodes ``get_attr`` with these targets are.
    """

    graph: fx.Graph
    constants: dict[str, Any]


def record(
    model: nn.Module, through: Mapping[str, nn.Module], given: Sequence[str | int], *, fixed: Mapping[str, Any],
    example: Mapping[str | int, Any] | None, functions: Iterable[Callable[..., Any]] = (),
) -> Recorded:  # fmt: skip
    """Trace ``model.forward``.

    Args:
        through: modules, by path, whose forward is traced; all others are leaves. With ``model`` itself, as "".
        given: the arguments of forward: places and names.
        fixed: arguments of forward that are the same in all batches, by name.
        example: values of the arguments; None: nothing is known of them.
        functions: that are called in each forward instead of being traced.

    Raises:
        Refused: where and why it cannot be traced.
    """
    tracer = _Tracer(model, through, given, fixed, example)
    try:
        with (
            unchanged(model),
            tracer.fake or contextlib.nullcontext(),
            _Constants(tracer),
            leaf_functions(tracer, functions, through),
            tracer.regions.open(),
        ):
            graph = tracer.trace(model)
    except Exception as error:
        raise Refused(_sentence(error, tracer)) from error
    for node in graph.nodes:
        node.meta = {name: node.meta[name] for name in _LASTING if name in node.meta}
    return Recorded(graph=graph, constants=tracer.constants)


_LASTING = ("path", "key", "region", "checkpoint")
"""What is known of a node and needed when it runs: see ``_Tracer.create_node``, ``create_args_for_root``, and
``zoo.pipe.tracing.leaves``."""


class _Symbol(fx.Proxy):
    """A value of the forward that is being traced."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what code asks about tensors of its own
            raise AttributeError(name)
        tracer: Any = self.tracer
        return (_Attribute if tracer.fake is None else _KnownAttribute)(self, name)

    def __bool__(self) -> bool:
        return bool(_decide(self, bool))

    def __index__(self) -> int:
        return int(_decide(self, int))

    def __int__(self) -> int:
        return int(_decide(self, int))

    def __float__(self) -> float:
        return float(_decide(self, float))

    def __len__(self) -> int:
        return int(_decide(self, len))

    def __setitem__(self, at: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, at, value), {})

    def __contains__(self, item: Any) -> bool:
        found, value = _known(self)
        if not found or isinstance(value, torch.Tensor):
            _undecided(self, "whether something is in it")
        return item in value


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[_Symbol, Any], Any]:
    return lambda symbol, other: symbol.tracer.create_proxy("call_function", function, (symbol, other), {})


for _function in IN_PLACE:
    setattr(_Symbol, f"__{_function.__name__}__", _in_place(_function))


class _Known(_Symbol):
    """A symbol with an example."""

    def __iter__(self) -> Iterator[Any]:
        symbol: Any = self
        return iter([symbol[i] for i in range(_decide(self, len))])

    @property
    def __class__(self) -> Any:  # isinstance(x, Tensor) is true of what will be one
        found, value = _known(self)
        return type(value) if found and not isinstance(value, fx.Proxy) else type(self)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise AttributeError("__class__")


class _Attribute(_Symbol):
    """``x.name``, which becomes a node when it is more than the name of a method."""

    def __init__(self, root: fx.Proxy, name: str) -> None:
        self.root, self.attr, self.tracer = root, name, root.tracer
        self._node: fx.Node | None = None

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        if self._node is None:
            self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class _KnownAttribute(_Attribute):
    def __iter__(self) -> Iterator[Any]:
        tracer: Any = self.tracer
        return iter(tracer.proxy(self.node))


def _known(symbol: fx.Proxy) -> tuple[bool, Any]:
    meta = symbol.node.meta
    return "example" in meta, meta.get("example")


def _decide(symbol: _Symbol, kind: Callable[[Any], Any]) -> Any:
    """What the example says, with a guard."""
    found, value = _known(symbol)
    if not found or (isinstance(value, torch.Tensor) and kind is not len):
        _undecided(symbol, {bool: "a branch", len: "a length", str: "a name"}.get(kind, "a number"))
    answer = kind(value)
    where = _where()
    symbol.tracer.create_proxy("call_function", guard, (symbol, kind.__name__, answer, where), {})
    return answer


def guard(value: Any, kind: str, expected: Any, where: str) -> None:
    """Raise unless ``kind`` of ``value`` is as it was when the forward was traced."""
    kinds: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float, "len": len, "str": str}
    found = kinds[kind](value)
    if found != expected:
        raise ValueError(
            f"{where}: this batch takes another path than the example that the model was traced with ({kind} is "
            f"{found}, and was {expected}); give split() an example like it, or bring batches to one form."
        )


def _undecided(symbol: _Symbol, what: str) -> NoReturn:
    value = symbol.node.meta.get("example")
    by = "by the values of a tensor" if isinstance(value, torch.Tensor) else "by what is not known before it runs"
    raise Refused(f"{what} is decided {by}")


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(
        self, model: nn.Module, through: Mapping[str, nn.Module], given: Sequence[str | int],
        fixed: Mapping[str, Any], example: Mapping[str | int, Any] | None,
    ) -> None:  # fmt: skip
        super().__init__(autowrap_modules=())
        self._through = {id(m): path for path, m in through.items()}
        self._given, self._fixed = given, fixed
        self._paths = {id(m): path for path, m in reversed(list(model.named_modules()))}
        self.path = [""]
        self.evaluating = False
        self.regions = Regions(lambda given: str(_decide(given, str)) if isinstance(given, _Symbol) else given)
        self.constants: dict[str, Any] = {}
        self._lasting = {id(v) for m in through.values() for v in vars(m).values()}
        self._lasting |= {id(v) for v in fixed.values()}
        self.fake: Any = None
        self._examples: dict[str | int, Any] = {}
        if example is not None:
            from torch._subclasses.fake_tensor import FakeTensorMode

            self.fake = FakeTensorMode(allow_non_fake_inputs=True)
            self._examples = {key: self._faked(value) for key, value in example.items()}

    def _faked(self, value: Any) -> Any:
        tree = torch.utils._pytree
        return tree.tree_map_only(torch.Tensor, lambda t: self.fake.from_tensor(t.detach(), static_shapes=True), value)

    # What fx asks ----------------------------------------------------------------------------------------------------

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Placeholders for what is given; everything else is fixed, or has its default."""
        places: list[Any] = []
        names: dict[str, Any] = {}
        for key in self._given:
            name = key if isinstance(key, str) else f"argument_{key}"
            proxy = self.create_proxy("placeholder", name, (), {})
            proxy.node.meta["key"] = key
            if key in self._examples:
                proxy.node.meta["example"] = self._examples[key]
                proxy = self.proxy(proxy.node)
            if isinstance(key, int):
                places.append(proxy)
            else:
                names[key] = proxy

        def run(model: nn.Module) -> Any:
            return root_fn(model, *places, **names, **self._fixed)

        return run, [self.root]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """All but those that are cut."""
        return id(m) not in self._through

    def path_of_module(self, mod: nn.Module) -> str:
        """The first one."""
        found: str | None = self._paths.get(id(mod))
        if found is None:
            raise Refused(f"{type(mod).__name__} is called and has parameters, and is no submodule of the model")
        return found

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A node for a leaf; the forward of all others."""
        made = id(m) not in self._paths and not any(True for _ in m.parameters())  # a module as a function
        if self.evaluating or made:
            return forward(*args, **kwargs)
        if id(m) in self._through:
            self.path.append(self.path_of_module(m))
            found = forward(*args, **kwargs)
            self.path.pop()  # it stays after an exception, which says where that was
            return found
        return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)

    def attribute(self, path: str) -> Any:
        """What a node ``get_attr`` with this target is."""
        return _attribute(self.root, path, self.constants)

    def leaf_path(self, module: nn.Module) -> str | None:
        """The path of a module that is called as it is; None for others."""
        return None if id(module) in self._through else self._paths.get(id(module))

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Parameters and buffers of modules that are traced through are nodes."""
        return attr_val if self.evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """It knows in which module it was made, and under ``no_grad`` or ``autocast``."""
        node = super().create_node(*args, **kwargs)
        node.meta["path"] = self.path[-1]
        if (region := self.regions.now()) is not None:
            node.meta["region"] = region
        return node

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        """A symbol; with its example, where there is one."""
        found = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        if self.fake is None or kind == "placeholder":
            return found
        node = found.node
        with contextlib.suppress(Exception):  # then it is not known
            self._evaluate(node)
        return self.proxy(node)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A symbol of the node."""
        return _Known(node, self) if "example" in node.meta else _Symbol(node, self)

    def create_arg(self, a: Any) -> Any:
        """What fx knows as an argument, and dataclasses, tensors and what the modules have."""
        if type(a) in (_Symbol, _Known, _Attribute, _KnownAttribute):
            return a.node
        if (isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter)) or self._is_lasting(a):
            return self._constant(a)
        if dataclasses.is_dataclass(a) and not isinstance(a, type):
            fields = {f.name: self.create_arg(getattr(a, f.name)) for f in dataclasses.fields(a) if f.init}
            return self.create_node("call_function", type(a), (), fields)
        if type(a) is OrderedDict:
            return self.create_node("call_function", OrderedDict, (self.create_arg(dict(a)),), {})
        try:
            return super().create_arg(a)
        except NotImplementedError:
            if isinstance(a, enum.Enum | type | types.FunctionType | types.MethodType):
                return self._constant(a)
            raise Refused(
                f"an object of class {type(a).__name__}, made in forward, goes to a submodule or function, and would "
                "be the same one in all forwards (a cache? give use_cache=False)"
            ) from None

    # Inside ----------------------------------------------------------------------------------------------------------

    def _is_lasting(self, value: Any) -> bool:
        """Whether it is an object that a module has, such as its configuration."""
        plain = (bool, int, float, complex, str, bytes, tuple, list, dict, torch.Tensor, type(None))
        return id(value) in self._lasting and not isinstance(value, plain)

    def _constant(self, value: Any) -> fx.Node:
        if _is_fake(value):
            raise Refused(
                "a tensor that is made in forward, or kept by a hook, has no values when it is traced; make it with "
                "torch.tensor or another function of torch, or in __init__ (register_buffer)"
            )
        name = next((name for name, known in self.constants.items() if known is value), "")
        if not name:
            name = f"<constant {len(self.constants)}>"
            self.constants[name] = value
        node = self.create_node("get_attr", name, (), {})
        node.meta["example"] = self._without_values(value)
        return node

    def _without_values(self, value: Any) -> Any:
        """So that nothing is changed when it is evaluated."""
        if self.fake is None or not isinstance(value, torch.Tensor) or _is_fake(value):
            return value
        return self.fake.from_tensor(value, static_shapes=True)

    def _evaluate(self, node: fx.Node) -> None:
        if node.target is guard:
            return
        args, kwargs = (filled(given, lambda n: n.meta["example"]) for given in (node.args, node.kwargs))
        self.evaluating = True
        try:
            with torch.no_grad():
                if node.op == "call_module":
                    value = self.root.get_submodule(str(node.target))(*args, **kwargs)
                elif node.op == "call_method":
                    value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                elif node.op == "get_attr":
                    value = self._without_values(self.attribute(str(node.target)))
                else:
                    target: Any = node.target
                    value = target(*args, **kwargs)
        finally:
            self.evaluating = False
        node.meta["example"] = value


def filled(given: Any, value_of: Callable[[fx.Node], Any]) -> Any:
    """Arguments with the values of nodes in their places; lists and dicts are new ones."""
    if isinstance(given, fx.Node):
        return value_of(given)
    if isinstance(given, dict):
        return {key: filled(item, value_of) for key, item in given.items()}
    if isinstance(given, list):
        return [filled(item, value_of) for item in given]
    if isinstance(given, tuple):
        many = [filled(item, value_of) for item in given]
        return type(given)(*many) if hasattr(given, "_fields") else tuple(many)
    if isinstance(given, slice):
        return slice(*(filled(item, value_of) for item in (given.start, given.stop, given.step)))
    return given


def _attribute(model: nn.Module, path: str, constants: Mapping[str, Any]) -> Any:
    if path in constants:
        return constants[path]
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


class _Constants(TorchFunctionMode):
    """What is made of no symbols, but of numbers or of a module's own tensors, is made in each forward anew."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tracer = kwargs or {}, self._tracer
        if tracer.evaluating or (func not in FACTORIES and has_symbols((args, kwargs))):
            return func(*args, **kwargs)
        if func not in FACTORIES:
            tracer.evaluating = True  # what it calls in turn is its own
            try:
                found = func(*args, **kwargs)
            finally:
                tracer.evaluating = False
            if tracer.fake is None or not any(map(_is_fake, torch.utils._pytree.tree_leaves(found))):
                return found
        return tracer.create_proxy("call_function", func, args, kwargs)


def _is_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) is FakeTensor


def _own(name: str) -> bool:
    """Whether a file is the model's, and not of those who trace it."""
    here = [os.path.join(os.path.dirname(__file__), f"{file}.py") for file in ("symbols", "leaves", "regions")]
    return not name.startswith(("<", os.path.dirname(torch.__file__), contextlib.__file__, *here))


def _where() -> str:
    """The line of the model that is being traced."""
    frame: Any = sys._getframe(1)
    while frame is not None and not _own(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "forward"


def _last_line(error: BaseException) -> tuple[str, int]:
    """The innermost line of the model's own code."""
    frames = [
        (t.tb_frame.f_code.co_filename, t.tb_lineno) for t in _traces(error) if _own(t.tb_frame.f_code.co_filename)
    ]
    return frames[-1] if frames else ("?", 0)


def _traces(error: BaseException) -> Iterator[types.TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _sentence(error: Exception, tracer: _Tracer) -> str:
    name, number = _last_line(error)
    code = linecache.getline(name, number).strip()
    path = tracer.path[-1]
    module = f"{path!r} ({type(tracer.root.get_submodule(path)).__name__})" if path else type(tracer.root).__name__
    advice = "" if tracer.fake is not None else "give split() an example= of a batch, so that shapes are known; "
    return (
        f"{name}:{number}, in the forward of {module}, cannot be traced (`{code}`): {str(error).rstrip('.')}. To cut "
        f"through this forward {advice}name the function that decides in leaf_functions=, move that code into a "
        "submodule that no split point is in, or fix an argument (a plain value in the example)."
    )
