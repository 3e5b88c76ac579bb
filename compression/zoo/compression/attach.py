"""Transforms on modules: a generated subclass calls the module's own forward with changed tensors.

The class of a module with transforms is a subclass of its own class, made once for each class, with the same name. Its
forward puts T(w) in the instance's ``__dict__`` for the time of the call, where Python finds it before the parameter.
Parameters, their names, ``state_dict``, ``isinstance`` and the source of the model stay as they are; copies and pickles
have the transforms too. While no transform is active the module's own forward runs and nothing else.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.compression.technique import Transform, Where, applied, in_order, owner_of, parameter_of
from zoo.parts import own_hook

_KEY = "_zoo_compression"
_classes: dict[type, type] = {}


class Attached:
    """The transforms of one module, by place: ("weight", "weight"), ("input", ""), ..., each list in order."""

    def __init__(self) -> None:
        self.transforms: dict[tuple[Where, str], list[Transform]] = {}

    def add(self, where: Where, parameter: str, transform: Transform) -> None:
        """One more."""
        here = self.transforms.get((where, parameter), [])
        self.transforms[(where, parameter)] = in_order([*here, transform])

    @property
    def active(self) -> bool:
        """Whether any of them changes anything now."""
        for transforms in self.transforms.values():
            for transform in transforms:
                if transform.active:
                    return True
        return False


def attach(module: nn.Module, where: Where, parameter: str, transform: Transform) -> None:
    """Let ``transform`` change a tensor of ``module`` from now on.

    Args:
        parameter: name of a weight, as seen from the module; "" for an input or an output.

    Raises:
        ValueError: the module cannot have one, or not this one.
    """
    name = transform.site.name
    if where == "weight" and parameter_of(module, parameter) is None:
        raise ValueError(f"{name}: a {type(module).__name__} has no parameter {parameter!r}.")
    if "forward" in module.__dict__:
        raise ValueError(
            f"{name}: the module {transform.site.module!r} has a forward of its own, set on the instance, which would "
            "hide its transforms. Compress the model first, and set it afterwards."
        )
    if where == "weight" and isinstance(module, nn.Embedding) and module.max_norm is not None:
        raise ValueError(
            f"{name}: an Embedding with max_norm = {module.max_norm} writes to its weight in forward, and would write "
            "to a changed copy. Leave max_norm or the transform out."
        )
    learned = transform.learned
    taken = [key for key in learned if hasattr(module, key)]
    if taken:
        raise ValueError(f"{name}: the module {transform.site.module!r} has an attribute {taken[0]!r} already.")
    attached: Attached = module.__dict__.get(_KEY) or Attached()
    attached.add(where, parameter, transform)
    for key, value in learned.items():
        module.register_parameter(key, value)
    if _KEY not in module.__dict__:
        module.__dict__[_KEY] = attached
        module.__class__ = _compressed(type(module))
        # The fused kernels of torch's encoder layers read weights without calling their modules; hooks keep them off.
        module.register_forward_pre_hook(_is_called)


def detach(model: nn.Module, transforms: Iterable[Transform] | None = None) -> None:
    """Take transforms off a model, all or these. What they have learned goes with them; a module that has none left has
    the class and the forward that it had."""
    only = None if transforms is None else {id(t) for t in transforms}
    for module in model.modules():
        attached: Attached | None = module.__dict__.get(_KEY)
        if attached is None:
            continue
        gone = {id(t): t for t in _unique(attached) if only is None or id(t) in only}
        for transform in gone.values():
            for key in transform.learned:
                module._parameters.pop(key, None)
        left = {place: [t for t in there if id(t) not in gone] for place, there in attached.transforms.items()}
        attached.transforms = {place: there for place, there in left.items() if there}
        if not attached.transforms:
            del module.__dict__[_KEY]
            module.__class__ = type(module).__mro__[1]
            for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _is_called]:
                del module._forward_pre_hooks[number]


def attached_to(module: nn.Module) -> Mapping[tuple[Where, str], Sequence[Transform]]:
    """The transforms of one module, by place."""
    attached = module.__dict__.get(_KEY)
    return attached.transforms if attached is not None else {}


def transforms_of(model: nn.Module) -> list[Transform]:
    """All transforms of a model, each once, in the order of its modules."""
    found: dict[int, Transform] = {}
    for module in model.modules():
        attached = module.__dict__.get(_KEY)
        if attached is not None:
            found.update({id(transform): transform for transform in _unique(attached)})
    return list(found.values())


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module as the user wrote it."""
    return type(module).__mro__[1] if _KEY in module.__dict__ else type(module)


def _unique(attached: Attached) -> Iterable[Transform]:
    return {id(t): t for transforms in attached.transforms.values() for t in transforms}.values()


@own_hook
def _is_called(module: nn.Module, args: Any) -> None:
    """Nothing: see attach."""


def _compressed(original: type) -> type:
    """The generated subclass of a class."""
    found = _classes.get(original)
    if found is not None:
        return found
    own: Callable[..., Any] = original.forward  # type: ignore[attr-defined]
    inherited: Callable[..., Any] = original.__reduce_ex__
    changed = _changed_eagerly()

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        attached = self.__dict__.get(_KEY)
        if attached is None or not attached.active:
            return own(self, *args, **kwargs)
        return changed(self, attached, own, args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        made = inherited(self, protocol)
        if made[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_new, (original, *made[1][1:]), *made[2:])
        return (_made_anew, (original, made[0], made[1]), *made[2:])

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    cls = type(original)(original.__name__, (original,), {**names, "forward": forward, "__reduce_ex__": reduce})
    return _classes.setdefault(original, cls)


def _new(original: type, *args: Any) -> Any:
    cls = _compressed(original)
    return cls.__new__(cls, *args)


def _made_anew(original: type, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    args = tuple(original if isinstance(a, type) and a is _classes.get(original) else a for a in args)
    made = make(*args)
    made.__class__ = _compressed(original)
    return made


def _changed(module: nn.Module, attached: Attached, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    shadowed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for (where, path), transforms in attached.transforms.items():
            if where == "weight" and any(t.active for t in transforms):
                owner, name = owner_of(module, path)
                weight = owner._parameters.get(name)
                if weight is None:
                    raise ValueError(
                        f"{transforms[0].site.name} is no parameter any more (torch.nn.utils.parametrize, weight_norm "
                        "and the like take it away), and a transform changes it. Leave the module out of its patterns, "
                        "or remove what computes its weight."
                    )
                value = _through(module, transforms, weight)
                shadowed.append((owner.__dict__, name, owner.__dict__.get(name)))
                owner.__dict__[name] = value
        inputs = attached.transforms.get(("input", ""))
        if inputs is not None:
            args, kwargs = _with_input(module, inputs, args, kwargs)
        output = own(module, *args, **kwargs)
    finally:
        # What was there before is back, also where this call is one inside of another of the same module.
        for there, name, before in reversed(shadowed):
            if before is None:
                there.pop(name, None)
            else:
                there[name] = before
    outputs = attached.transforms.get(("output", ""))
    return output if outputs is None else _with_output(module, outputs, output)


@functools.cache
def _changed_eagerly() -> Callable[..., Any]:
    """A graph that is compiled breaks there; what is inert compiles whole. Made when a first class is: it brings the
    compiler."""
    found: Callable[..., Any] = torch.compiler.disable(_changed)  # type: ignore[no-untyped-call]
    return found


def _through(module: nn.Module, transforms: Iterable[Transform], value: Any) -> Any:
    def call(transform: Transform, value: Tensor) -> Tensor:
        transform.training, transform.used = module.training, True
        return transform(value)

    return applied(module, (t for t in transforms if t.active), value, call)


def _with_input(
    module: nn.Module, transforms: Sequence[Transform], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for i, value in enumerate(args):
        if _is_real(value):
            return (*args[:i], _through(module, transforms, value), *args[i + 1 :]), kwargs
    for key, value in kwargs.items():
        if _is_real(value):
            return args, {**kwargs, key: _through(module, transforms, value)}
    raise TypeError(
        f"{transforms[0].site.name}: a {class_of(module).__name__} was called without a tensor of floating point, and "
        f"{transforms[0].site.group or 'a transform'} changes its input. Let its patterns leave the module out."
    )


def _with_output(module: nn.Module, transforms: Sequence[Transform], output: Any) -> Any:
    if _is_real(output):
        return _through(module, transforms, output)
    if type(output) in (tuple, list):
        for i, value in enumerate(output):
            if _is_real(value):
                return type(output)([*output[:i], _through(module, transforms, value), *output[i + 1 :]])
    raise TypeError(
        f"{transforms[0].site.name}: a {class_of(module).__name__} returned a {type(output).__name__}, and "
        f"{transforms[0].site.group or 'a transform'} changes its output; that is a tensor of floating point, or a "
        "tuple or list with one. Let its patterns leave the module out."
    )


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
