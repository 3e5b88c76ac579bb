"""What is called as it is while a forward is traced, and what tracing must leave as it was.

Symbols pass for tensors where Python asks, and so must not come to functions in C that do not ask (``Function.apply``,
``torch.utils.checkpoint``, scripted functions): these make nodes, too, and those of ``torch.func`` are refused.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import fx, nn

__all__ = [
    "FACTORIES", "IN_PLACE", "Refused", "Tracing", "changed_in_place", "has_symbols", "leaf_functions", "unchanged",
]  # fmt: skip

FACTORIES: frozenset[Any] = frozenset({
    torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace, torch.normal, torch.ones,
    torch.rand, torch.randint, torch.randn, torch.randperm, torch.tensor, torch.tril_indices, torch.triu_indices,
    torch.zeros,
})  # fmt: skip
"""They make tensors out of numbers: in each forward anew, on the device of that one."""

IN_PLACE = tuple(
    getattr(operator, name) for name in (
        "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift",
        "irshift",
    )
)  # fmt: skip
"""``x += y`` and its like, which change x where x can be changed."""

_MASKS = "transformers.masking_utils"
"""A module whose functions ``create_…_mask`` decide by values; they are called as they are, in each forward."""

_SKIPS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
"""Their options to return None where values allow it: a message between stages has the same tensors each time."""

_TRANSFORMS = ("vmap", "grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian")
"""Functions of ``torch.func``."""

_log = logging.getLogger("zoo.pipe")


class Refused(ValueError):
    """A forward that cannot be traced."""


class Tracing(Protocol):
    """The tracer, as it is used here."""

    evaluating: bool

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        """A node, and its symbol."""

    def leaf_path(self, module: nn.Module) -> str | None:
        """The path of a module that is called as it is; None for others."""

    def attribute(self, path: str) -> Any:
        """What a node ``get_attr`` with this target is."""


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """What a forward sets on its modules is undone: symbols, and tensors without values."""
    kept: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, dict[str, Any]]]]] = [
        (m, dict(vars(m)), [(inside, dict(inside)) for inside in (m._parameters, m._buffers, m._modules)])
        for m in model.modules()
    ]
    # Submodules run with tensors without values, and what they change of their own alone is changed all the same: how
    # many batches a BatchNorm has seen.
    numbers = [
        (buffer, buffer._version, buffer.detach().clone())
        for buffer in model.buffers() if not buffer.is_meta and not buffer.is_inference()
    ]  # fmt: skip
    try:
        yield
    finally:
        for module, attributes, insides in kept:
            vars(module).clear()
            vars(module).update(attributes)
            for inside, items in insides:
                inside.clear()
                inside.update(items)
        with torch.no_grad():
            for tensor, version, value in numbers:
                if tensor._version != version:
                    tensor.copy_(value)


@contextlib.contextmanager
def leaf_functions(
    tracer: Tracing, functions: Iterable[Callable[..., Any]], through: Mapping[str, nn.Module]
) -> Iterator[None]:
    """In torch, and in the modules where the traced classes come from, these functions make nodes while this is open.

    Also ``Function.apply`` of whatever class, scripted functions, and ``torch.utils.checkpoint.checkpoint``.
    """
    masks = vars(sys.modules[_MASKS]) if _MASKS in sys.modules else {}
    checkpoint = torch.utils.checkpoint.checkpoint
    called = [*FACTORIES, *functions]
    nodes = {id(f): (f, _as_node(tracer, f)) for f in called}
    nodes |= {
        id(f): (f, _as_node(tracer, f)) for name, f in masks.items() if name.startswith("create_") and callable(f)
    }
    nodes[id(checkpoint)] = checkpoint, _checkpointing(tracer, checkpoint)
    nodes |= {id(f): (f, _without_symbols(tracer, f)) for f in (getattr(torch.func, name) for name in _TRANSFORMS)}
    homes = {base.__module__ for m in through.values() for base in type(m).__mro__}
    homes = (homes - {"builtins", "torch.nn.modules.module"}) | {"torch", "torch.func", "torch.utils.checkpoint"}
    patched: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for space in [vars(sys.modules[home]) for home in sorted(homes) if home in sys.modules] + [
            vars(m) for m in through.values()
        ]:
            for name, value in list(space.items()):
                found = _instead(value, nodes)
                if found is not None:
                    patched.append((space, name, value))
                    space[name] = found
        with _functions_in_c(tracer), _no_symbols_as_buffers(tracer):
            yield
    finally:
        for space, name, value in patched:
            space[name] = value


def _instead(value: Any, nodes: Mapping[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, functools.partial):  # options of checkpoint that a model keeps
        known, node = nodes.get(id(value.func), (None, None))
        return functools.partial(node, *value.args, **value.keywords) if known is value.func and node else None
    known, node = nodes.get(id(value), (None, None))
    return node if known is value else None


def _as_node(tracer: Tracing, function: Callable[..., Any]) -> Callable[..., Any]:
    options = {} if function in FACTORIES else {
        name: False for name in _SKIPS if name in inspect.signature(function).parameters
    }  # fmt: skip

    @functools.wraps(function)
    def node(*args: Any, **kwargs: Any) -> Any:
        if tracer.evaluating:
            return function(*args, **kwargs)
        if options and kwargs.get("attention_mask") is not None:
            kwargs = {**options, **kwargs}
        return tracer.create_proxy("call_function", function, args, kwargs)

    return node


def _without_symbols(tracer: Tracing, transform: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(transform)
    def made(*args: Any, **kwargs: Any) -> Any:
        if tracer.evaluating:
            return transform(*args, **kwargs)
        if has_symbols((args, kwargs)):
            raise Refused(f"{transform.__name__} of torch.func cannot be traced")
        inside = transform(*args, **kwargs)

        def call(*given: Any, **named: Any) -> Any:
            if not tracer.evaluating and has_symbols((given, named)):
                raise Refused(f"{transform.__name__} of torch.func cannot be traced")
            return inside(*given, **named)

        return call

    return made


def _checkpointing(tracer: Tracing, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpointed submodule is a leaf that is checkpointed in each forward; any other function is traced."""
    parameters = inspect.signature(checkpoint).parameters.values()
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

    def node(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if tracer.evaluating:
            return checkpoint(function, *args, **kwargs)
        if function is None:
            return functools.partial(functools.partial, node, **kwargs)
        options = {name: kwargs.pop(name) for name in names & set(kwargs)}
        while isinstance(function, functools.partial):
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        path = tracer.leaf_path(function) if isinstance(function, nn.Module) else None
        if path is None:
            _log.warning(
                "the forward checkpoints %s, which is no submodule that is called as a whole: it is traced, and its "
                "activations are kept; use activation_checkpoint_interval=.",
                getattr(function, "__qualname__", type(function).__name__),
            )
            return function(*args, **kwargs)
        found = tracer.create_proxy("call_module", path, args, kwargs)
        found.node.meta["checkpoint"] = options
        return found

    return node


@contextlib.contextmanager
def _functions_in_c(tracer: Tracing) -> Iterator[None]:
    base: Any = torch.autograd.Function
    scripted: Any = torch.jit.ScriptFunction
    before, call_scripted = vars(base).get("apply"), scripted.__call__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = super(base, cls).apply if before is None else before.__get__(None, cls)
        if tracer.evaluating or not has_symbols((args, kwargs)):
            return own(*args, **kwargs)
        return tracer.create_proxy("call_function", own, args, kwargs)

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        def own(*args: Any, **kwargs: Any) -> Any:
            return call_scripted(function, *args, **kwargs)

        if tracer.evaluating or not has_symbols((args, kwargs)):
            return own(*args, **kwargs)
        return tracer.create_proxy("call_function", own, args, kwargs)

    base.apply, scripted.__call__ = classmethod(apply), call
    try:
        yield
    finally:
        scripted.__call__ = call_scripted
        if before is None:
            del base.apply
        else:
            base.apply = before


@contextlib.contextmanager
def _no_symbols_as_buffers(tracer: Tracing) -> Iterator[None]:
    before = nn.Module.__setattr__

    def set_(module: nn.Module, name: str, value: Any) -> None:
        if not tracer.evaluating and isinstance(value, fx.Proxy) and (
            name in module._buffers or name in module._parameters
        ):  # fmt: skip
            read = changed_in_place(value.node)
            if read is not None and tracer.attribute(str(read.target)) is getattr(module, name):
                return  # self.count += 1
            raise Refused(
                f"it sets {name!r} of a {type(module).__name__} to another tensor, which nobody would know in the next "
                "forward; change it in place (copy_, add_)"
            )
        before(module, name, value)

    nn.Module.__setattr__ = set_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = before  # type: ignore[method-assign]


def changed_in_place(node: fx.Node) -> fx.Node | None:
    """The node ``get_attr`` whose tensor this one changes, and is; None where it does not."""
    while node.op != "get_attr":
        method = str(node.target) if node.op == "call_method" else ""
        in_place = node.target in IN_PLACE or node.target is operator.setitem
        if not in_place and (not method.endswith("_") or method.endswith("__")):
            return None
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return node


def has_symbols(tree: Any) -> bool:
    """Whether there is one among arguments."""
    if isinstance(tree, dict):
        return any(map(has_symbols, tree.values()))
    if isinstance(tree, tuple | list):
        return any(map(has_symbols, tree))
    return isinstance(tree, fx.Proxy)
