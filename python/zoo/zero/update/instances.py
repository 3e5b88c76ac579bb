"""An optimizer that exists already, taken over by a ZeRO optimizer.

The wrapped optimizer works on this rank's segments, so it is built once more, by the same class with the same
arguments; of the instance its parameter groups live on. They are the same dict objects in both, so that whoever holds
the instance (a learning-rate schedule) still sets the options that updates read.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from zoo.zero.update.probe import replaced
from zoo.zero.update.torch_interface import OuterOptimizer
from zoo.zero.update.trial import fresh, without_params

_HOOKS = tuple(
    f"_optimizer_{method}_{when}_hooks"
    for method in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
_OF_SCHEDULES = frozenset({"_opt_called", "_step_count"})
"""What torch's schedules leave on an optimizer."""
_OURS = frozenset({*_HOOKS, "state", "param_groups", "defaults"})
_REFUSED = ("step", "add_param_group", "state_dict", "load_state_dict")
_INSTEAD = "pass the class (optimizer=torch.optim.AdamW) and its arguments (lr=3e-4) instead."


def check(instance: torch.optim.Optimizer, params: Iterable[Any] | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an instance that was used, is taken over, is a wrapper itself, or came with arguments that
    are its own. One whose taker was closed is as it was before."""
    name = type(instance).__name__
    _free(instance)
    if isinstance(instance, OuterOptimizer):
        raise ValueError(f"optimizer= is a {name}, which wraps an optimizer itself and cannot be wrapped again.")
    if options:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ValueError(
            f"optimizer= is an instance of {name}, and {given} came with it, which belong to its construction; "
            f"construct it with them, or {_INSTEAD}"
        )
    if params is not None:
        raise ValueError(
            f"optimizer= is an instance of {name}, which has its parameter groups; leave params= out, or {_INSTEAD}"
        )
    used = [s for s in instance.state.values() if s and (not isinstance(s, Mapping) or _step_of(s) != 0)]
    if used:
        raise ValueError(
            f"optimizer= is an instance of {name} that has state of {len(used)} parameters already, which would be "
            "lost. Wrap it before its first step; to go on with a state, load it into the ZeRO optimizer."
        )


def _step_of(state: Mapping[str, Any]) -> float:
    # Some optimizers make their states when they are built; a counter tells that nothing has happened yet.
    return float(state.get("step", 1))


class CannotRebuildError(ValueError):
    """No other optimizer can be made that is like an instance; why, as a clause."""


class Like:
    """Makes optimizers of a class with what somebody has put on an instance of it.

    Attributes of the class are attributes of this.
    """

    def __init__(self, cls: type, attributes: Mapping[str, Any], methods: Mapping[str, Any]) -> None:
        self._cls, self._attributes, self._methods = cls, dict(attributes), dict(methods)
        self.__name__, self.__qualname__, self.__module__ = cls.__name__, cls.__qualname__, cls.__module__

    def __call__(self, groups: Any, **options: Any) -> Any:
        made = self._cls(groups, **options)
        vars(made).update({key: fresh(value) for key, value in self._attributes.items()})
        for name, function in self._methods.items():
            setattr(made, name, MethodType(function, made))
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._cls, name)


def another_like(instance: torch.optim.Optimizer) -> tuple[Any, dict[str, Any]]:
    """What makes another optimizer like an instance, and the arguments beside parameters.

    Raises:
        CannotRebuildError: an argument that must be given is neither among its defaults nor an attribute, what they
            make is another one in some attribute, or a method was replaced by a function of its own.
    """
    arguments = _arguments_of(instance)
    again = _again(instance, arguments)
    for key, value in vars(instance).items():
        other = vars(again).get(key, value)
        if not key.startswith("_") and isinstance(value, (bool, int, float, str, torch.dtype)) and value != other:
            raise CannotRebuildError(f"it has {key}={value!r}, and built again from its defaults {key}={other!r}")
    methods = {}
    for name, value in replaced(instance).items():
        method = getattr(value, "__wrapped__", value) if hasattr(value, "_wrapped_by_lr_sched") else value
        if isinstance(value, MethodType) and value.__self__ is instance:
            methods[name] = value.__func__
        elif method is not value and isinstance(method, FunctionType):
            methods[name] = method
        else:
            raise CannotRebuildError(f"its {name}() was replaced by a function that is no method of it")
    watched = {name for name in vars(instance) if callable(getattr(type(instance), name, None))}
    added = {k: v for k, v in vars(instance).items() if k not in vars(again) and k not in watched | _OF_SCHEDULES}
    if not added and not methods:
        return type(instance), arguments
    return Like(type(instance), added, methods), arguments


def _arguments_of(instance: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parameter in signature_of(type(instance)):
        if parameter.name in instance.defaults:
            found[parameter.name] = instance.defaults[parameter.name]
        elif parameter.name in vars(instance):
            found[parameter.name] = vars(instance)[parameter.name]
        elif parameter.default is parameter.empty:
            raise CannotRebuildError(
                f"it does not show what its argument {parameter.name!r} was (it is neither in .defaults nor an "
                "attribute)"
            )
    return found


def _again(instance: torch.optim.Optimizer, arguments: Mapping[str, Any]) -> Any:
    own = without_params(instance.param_groups[0])
    try:
        return type(instance)([{**own, "params": [nn.Parameter(torch.zeros(2, 2))]}], **arguments)
    except Exception as error:
        raise CannotRebuildError(
            f"it cannot be built again from its defaults ({type(error).__name__}: {error})"
        ) from error


def double_of(instance: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The instance once more, with the same groups, states and attributes, and no hooks: these are the owner's."""
    double: Any = object.__new__(type(instance))
    vars(double).update(vars(instance))
    for name in _HOOKS:
        setattr(double, name, OrderedDict())
    changed = replaced(instance)
    for name, value in list(vars(instance).items()):
        if isinstance(value, MethodType) and value.__self__ is instance:
            setattr(double, name, MethodType(value.__func__, double))
        elif callable(value) and callable(getattr(type(instance), name, None)) and name not in changed:
            delattr(double, name)  # a schedule watches the instance
    return double  # type: ignore[no-any-return]


def signature_of(cls: type) -> list[inspect.Parameter]:
    """What the constructor takes beside itself and the parameters; through ``**kwargs`` what its bases take too."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())
        kinds = {p.kind for p in parameters}
        for parameter in parameters[2:]:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                found.setdefault(parameter.name, parameter)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return list(found.values())


class Follows:
    """What is set on an instance after it was taken over is set on the optimizer in its place too."""

    def __init__(self, instance: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
        self._instance, self._inner, self._seen = instance, inner, dict(vars(instance))

    def take(self) -> None:
        """Look for what is new.

        Raises:
            ValueError: a method was replaced.
        """
        for name, value in vars(self._instance).items():
            if self._seen.get(name, self) is value or name in _OURS or name in _OF_SCHEDULES:
                continue
            if callable(getattr(type(self._instance), name, None)):
                raise ValueError(
                    f"{name}() of the {type(self._instance).__name__} instance was replaced after it had been taken "
                    "over, and would never be called. Replace it before the ZeRO optimizer is constructed."
                )
            setattr(self._inner, name, value)
            self._seen[name] = value


class _Retired:
    """An instance that an optimizer has taken over, and what was there in the place of what refuses now.

    Attributes:
        watch: the hook that tells schedules of the taker's steps.
    """

    watch: Any

    def __init__(self, instance: torch.optim.Optimizer, owner: Any) -> None:
        self._instance, self._owner, self._taker = instance, weakref.ref(owner), type(owner).__name__
        self._before = {name: vars(instance).get(name) for name in _REFUSED}  # a schedule may have put one there

    def refusing(self, name: str) -> Any:
        """What takes the place of a method."""
        method = getattr(self._instance, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            owner = self._owner()
            if owner is None:
                return method(*args, **kwargs)
            kind = type(self._instance).__name__
            if owner.sharded.closed:
                raise ValueError(
                    f"{name}() of the {kind} instance that a {self._taker} took over, which was closed since: the "
                    f"instance has no states of the model's training. Construct a new {kind}."
                )
            raise ValueError(f"{name}() of the {kind} instance that a {self._taker} took over; call its {name}().")

        call._zoo_retired = self  # type: ignore[attr-defined]
        return call

    def free(self) -> None:
        """The instance may be taken over again.

        Raises:
            ValueError: the one that took it is not closed.
        """
        owner = self._owner()
        if owner is not None and not owner.sharded.closed:
            raise ValueError(
                f"optimizer= is an instance of {type(self._instance).__name__} that a {self._taker} has taken over "
                "already. close() that one first, or construct another instance."
            )
        for name, value in self._before.items():
            if value is not None:
                setattr(self._instance, name, value)
            else:
                vars(self._instance).pop(name, None)
        self.watch.remove()


def _free(instance: torch.optim.Optimizer) -> None:
    retired: _Retired | None = getattr(vars(instance).get("step"), "_zoo_retired", None)
    if retired is not None:
        retired.free()


def retire(instance: torch.optim.Optimizer, owner: torch.optim.Optimizer, inner: Any) -> Follows:
    """While ``owner`` exists the instance holds options only: a step of its own would be a second update, and its
    state is none. Hooks that were registered on it, or will be, are hooks of the owner."""
    for name in _HOOKS:  # the very dict, of which the user's handles remove them
        setattr(owner, name, vars(instance).setdefault(name, OrderedDict()))  # some constructors leave them out
    held: Any = instance
    retired = _Retired(instance, owner)
    for name in _REFUSED:
        setattr(held, name, retired.refusing(name))
    # A schedule that was made from the instance watches whether its step was called: that of the owner counts.
    held.step._wrapped_by_lr_sched = True
    retired.watch = owner.register_step_post_hook(lambda *_: setattr(held, "_opt_called", True))
    if inner.state is not instance.state:
        instance.state.clear()
    return Follows(instance, inner)
