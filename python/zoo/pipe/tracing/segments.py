"""Consecutive nodes of a traced forward as layers of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from zoo.pipe.tracing.leaves import changed_in_place
from zoo.pipe.tracing.regions import Around
from zoo.pipe.tracing.symbols import Recorded, filled
from zoo.pipe.trees import outline_text

__all__ = ["Segment", "Use", "cut", "loss_of"]


@dataclass(frozen=True, kw_only=True)
class Use:
    """What of the model nodes use: paths of modules that they call, and of parameters and buffers that they read, and
    of those among them that they change."""

    modules: frozenset[str]
    attributes: frozenset[str]
    changed: frozenset[str]


@dataclass(kw_only=True)
class _Part:
    """Some nodes: what comes in, what goes out, and after which node a value is no longer needed."""

    nodes: list[fx.Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    over: dict[fx.Node, list[str]]


@dataclass(kw_only=True)
class Segment:
    """A layer: values of the forward in, a tuple; values out that later ones need.

    Attributes:
        parts: in training, and in evaluation.
        constants: of the trace, by the names under which nodes read them.
        owner: the model, with parameters and submodules under the names that they have in the original; set where this
            layer is run.
        loss_only: in training the outcome of the model is replaced by the loss in it.
        num_parameters: of all modules and parameters that are used.
        fixed: arguments that batches do not give: what they were in the trace.
    """

    __name__: str
    parts: dict[bool, _Part]
    constants: Mapping[str, Any]
    use: Use
    num_parameters: int
    is_first: bool
    is_last: bool
    loss_only: bool
    fixed: Mapping[str, Any] = field(default_factory=dict, repr=False)
    owner: nn.Module | None = field(default=None, repr=False)

    def parameters(self) -> list[nn.Parameter]:
        """Of the modules that it calls, and those that it reads."""
        called = [p for path in sorted(self.use.modules) for p in _module(self._owner(), path).parameters()]
        read = [_value(self._owner(), path, self.constants) for path in sorted(self.use.attributes)]
        return called + [p for p in read if isinstance(p, nn.Parameter)]

    def buffers(self) -> list[torch.Tensor]:
        """The same of buffers."""
        called = [b for path in sorted(self.use.modules) for b in _module(self._owner(), path).buffers()]
        read = [_value(self._owner(), path, {}) for path in sorted(self.use.attributes) if path not in self.constants]
        return called + [b for b in read if isinstance(b, torch.Tensor) and not isinstance(b, nn.Parameter)]

    def _owner(self) -> nn.Module:
        if self.owner is None:
            raise AssertionError(f"the traced layer {self.__name__} is run on a rank that does not have it.")
        return self.owner

    def __call__(self, x: Any) -> Any:
        owner = self._owner()
        part = self.parts[owner.training]
        if self.is_first:
            _check_rest(x, [node.meta["key"] for node in part.nodes if node.op == "placeholder"], self.fixed)
        values: dict[str, Any] = {} if self.is_first else dict(zip(part.inputs, map(_unpack, x), strict=True))
        with Around() as around:
            for node in part.nodes:
                around.move(node.meta.get("region"))
                if node.op == "placeholder":
                    values[node.name] = _argument(x, node.meta["key"])
                elif node.op == "output":
                    outcome = filled(node.args[0], lambda n: values[n.name])
                    training = self.loss_only and owner.training and torch.is_grad_enabled()
                    return loss_of(outcome) if training else outcome
                else:
                    values[node.name] = _computed(owner, node, values, self.constants)
                for name in part.over.get(node, ()):
                    values.pop(name, None)
        return tuple(_pack(values[name]) for name in part.outputs)


def loss_of(outcome: Any) -> Any:
    """The loss in what a model returns: ``outcome["loss"]``, ``outcome.loss``, or the first of a tuple, if it has one
    element; otherwise ``outcome`` itself."""
    found = outcome.get("loss") if isinstance(outcome, Mapping) else getattr(outcome, "loss", None)
    if found is None and isinstance(outcome, tuple | list) and outcome:
        found = outcome[0]
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else outcome


def _argument(x: Any, key: int | str) -> Any:
    if isinstance(key, str):
        if not isinstance(x, Mapping) or key not in x:
            given = f"has {', '.join(map(repr, x))}" if isinstance(x, Mapping) else f"is a {type(x).__name__}"
            raise ValueError(f"the model was traced with a batch that has {key!r}; this one {given}.")
        return x[key]
    many = x if isinstance(x, tuple | list) else (x,)
    if key >= len(many):
        raise ValueError(f"the model was traced with at least {key + 1} inputs; this batch has {len(many)}.")
    return many[key]


def _check_rest(x: Any, keys: Sequence[int | str], fixed: Mapping[str, Any]) -> None:
    """What a batch gives beside the arguments of the trace would be left out in silence."""
    if any(isinstance(key, int) for key in keys):
        if isinstance(x, tuple | list) and len(x) > len(keys):
            raise ValueError(
                f"the model was traced with {len(keys)} inputs, and this batch has {len(x)}; give split() an example= "
                "with all of them."
            )
        return
    for name, value in x.items() if isinstance(x, Mapping) else ():
        if name in keys or (name in fixed and _same(value, fixed[name])):
            continue
        was = f"with {name!r} = {fixed[name]!r}" if name in fixed else f"without {name!r}"
        raise ValueError(
            f"the model was traced {was}, and this batch gives {outline_text(value)}; give split() an example= like "
            "the batches, or leave it out of these."
        )


def _same(value: Any, traced: Any) -> bool:
    return value is traced or (not isinstance(value, torch.Tensor) and bool(value == traced))


def _computed(owner: nn.Module, node: fx.Node, values: Mapping[str, Any], constants: Mapping[str, Any]) -> Any:
    if node.op == "get_attr":
        return _value(owner, str(node.target), constants)
    args, kwargs = (filled(given, lambda n: values[n.name]) for given in (node.args, node.kwargs))
    if node.op == "call_module":
        module, options = _module(owner, str(node.target)), node.meta.get("checkpoint")
        if options is None or not torch.is_grad_enabled():
            return module(*args, **kwargs)
        return checkpoint(module, *args, **options, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = node.target
    return function(*args, **kwargs)


def _module(owner: nn.Module, path: str) -> nn.Module:
    """A submodule; an attribute of the owner that has its name is none."""
    found: Any = owner
    for name in path.split(".") if path else ():
        found = found._modules[name]
    return found  # type: ignore[no-any-return]


def _value(owner: nn.Module, path: str, constants: Mapping[str, Any]) -> Any:
    if path in constants:
        return constants[path]
    where, _, name = path.rpartition(".")
    module = _module(owner, where)
    return module._parameters[name] if name in module._parameters else module._buffers[name]


def _pack(value: Any) -> Any:
    """As plain values, which messages are made of; the device becomes the one that the receiver uses."""
    if isinstance(value, torch.Size):
        return {"torch.Size": list(value)}
    if isinstance(value, torch.device):
        return {"torch.device": value.type}
    if isinstance(value, torch.dtype):
        return {"torch.dtype": str(value).removeprefix("torch.")}
    return value


def _unpack(value: Any) -> Any:
    if type(value) is dict and len(value) == 1:
        ((kind, inside),) = value.items()
        if kind == "torch.Size":
            return torch.Size(inside)
        if kind == "torch.device":
            return torch.device(inside)
        if kind == "torch.dtype":
            return getattr(torch, inside)
    return value


# Cutting -------------------------------------------------------------------------------------------------------------


def cut(
    model: nn.Module, recorded: Mapping[bool, Recorded], starts: Mapping[bool, Sequence[int]],
    names: Sequence[str], *, loss_only: bool, fixed: Mapping[str, Any],
) -> list[Segment]:  # fmt: skip
    """The segments of a trace in training and one in evaluation.

    Args:
        starts: for each of the two, the places of the nodes with which the second segment and later ones begin.
        names: of the segments.
        fixed: see :class:`Segment`.
    """
    parts = {mode: _parts(list(trace.graph.nodes), starts[mode]) for mode, trace in recorded.items()}
    constants: dict[str, Any] = {}
    for mode, trace in recorded.items():
        renamed = {name: f"{name[:-1]} of {'training' if mode else 'evaluation'}>" for name in trace.constants}
        constants |= {renamed[name]: value for name, value in trace.constants.items()}
        for node in trace.graph.nodes:
            if node.op == "get_attr" and node.target in renamed:
                node.target = renamed[node.target]
    segments = []
    for number, name in enumerate(names):
        use = _use((node for mode in parts for node in parts[mode][number].nodes), constants)
        segments.append(
            Segment(
                __name__=name,
                parts={mode: parts[mode][number] for mode in parts},
                constants=constants,
                use=use,
                num_parameters=sum(p.numel() for p in used(model, use)),
                is_first=number == 0,
                is_last=number == len(names) - 1,
                loss_only=loss_only,
                fixed=fixed,
            )
        )
    return segments


def used(model: nn.Module, use: Use) -> list[nn.Parameter]:
    """The parameters of a use, each once."""
    found = {id(p): p for path in sorted(use.modules) for p in model.get_submodule(path).parameters()}
    for path in sorted(use.attributes):
        value = _value(model, path, {})
        if isinstance(value, nn.Parameter):
            found[id(value)] = value
    return list(found.values())


def _use(nodes: Iterable[fx.Node], constants: Mapping[str, Any]) -> Use:
    many = list(nodes)
    changed = (changed_in_place(n) for n in many if n.op != "get_attr")
    return Use(
        modules=frozenset(str(n.target) for n in many if n.op == "call_module"),
        attributes=frozenset(str(n.target) for n in many if n.op == "get_attr" and n.target not in constants),
        changed=frozenset(str(n.target) for n in changed if n is not None and n.target not in constants),
    )


def _parts(nodes: Sequence[fx.Node], starts: Sequence[int]) -> list[_Part]:
    """What is read of the model is read in each part that uses it, and does not travel."""
    bounds = [0, *starts, len(nodes)]
    place = {node: number for number in range(len(bounds) - 1) for node in nodes[bounds[number] : bounds[number + 1]]}
    made = [node for node in nodes if node.op not in ("get_attr", "output")]
    last = {node: max((place[user] for user in node.users), default=place[node]) for node in made}
    parts = []
    for number in range(len(bounds) - 1):
        inside = [n for n in nodes[bounds[number] : bounds[number + 1]] if n.op != "get_attr"]
        read = {n: None for node in inside for n in node.all_input_nodes if n.op == "get_attr"}
        outputs = tuple(n.name for n in made if place[n] <= number < last[n])
        parts.append(
            _Part(
                nodes=[*read, *inside],
                outputs=outputs,
                over=_over(inside, set(outputs)),
                inputs=tuple(n.name for n in made if place[n] < number <= last[n]),
            )
        )
    return parts


def _over(nodes: Sequence[fx.Node], kept: set[str]) -> dict[fx.Node, list[str]]:
    """After which node which values are not needed any more."""
    seen: set[str] = set()
    over: dict[fx.Node, list[str]] = {}
    for node in reversed(nodes):
        for name in {node.name, *(n.name for n in node.all_input_nodes)} - kept - seen:
            seen.add(name)
            over.setdefault(node, []).append(name)
    return over
