"""The optimizer to wrap, and whether it can have flat segments in the place of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.zero.update.trial import Trial, in_trial, without_params


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """The optimizer to wrap.

    Attributes:
        make: builds it: ``make(groups, **options)``.
        groups: parameter groups, each trainable parameter of the model in exactly one. Those of an instance are the
            very dicts of the instance.
        instance: what ``optimizer=`` was, if it was an instance.
        cannot_rebuild: why ``make`` makes no other one like the instance, as a clause.
    """

    make: Any
    groups: Sequence[dict[str, Any]]
    options: dict[str, Any]
    instance: torch.optim.Optimizer | None = None
    cannot_rebuild: str | None = None


@dataclass(frozen=True)
class Tried:
    """What came out of :func:`try_out`.

    Attributes:
        groups: the options of each group, with defaults.
        why_whole: why the optimizer needs parameters as they are, as a clause; None if flat segments will do, or it
            takes parts.
        objects: they have to be the very parameters of the model.
        asked: attributes of parameters that it looks for, and no parameter has.
        quantises: states are kept in blocks of codes, which segments cut elsewhere: it is given parameters as they are
            where nothing is split.
    """

    groups: list[dict[str, Any]]
    why_whole: str | None = None
    objects: bool = False
    asked: frozenset[str] = frozenset()
    quantises: bool = False


def try_out(wrapped: Wrapped) -> Tried:
    """Try the wrapped optimizer on small tensors, before anything of the model is touched.

    Raises:
        ValueError: a learning rate that is no finite number.
        NotImplementedError: a step ends with an exception, or the optimizer knows parameters by their addresses.
        Exception: what its constructor says of its options or of a group's.
    """
    groups, options, make = wrapped.groups, wrapped.options, wrapped.make
    check_learning_rates(groups, options)
    parameters = [p for g in groups for p in g["params"]]
    if wrapped.cannot_rebuild is not None:
        from zoo.zero.update.held_parameters import found_in

        found_in(wrapped.instance, parameters)  # addresses are refused
        return Tried([without_params(g) for g in groups], wrapped.cannot_rebuild, objects=True)

    def build(of: list[dict[str, Any]]) -> Any:
        return make(of, **in_trial(options))

    whole = bool(getattr(make, "needs_whole_tensors", False))
    shape = (2, 2) if whole else (2,)
    try:
        made = make([{**without_params(g), "params": [nn.Parameter(torch.zeros(shape))]} for g in groups], **options)
    except ValueError:  # some take matrices alone
        made = make([{**without_params(g), "params": [nn.Parameter(torch.zeros(2, 2))]} for g in groups], **options)
    found = [without_params(g) for g in made.param_groups]
    if whole:
        return Tried(found)
    name = getattr(make, "__name__", str(make))
    if _is_plain(wrapped.instance or made):
        return Tried(found, _why_whole(make, options, build, name))
    from zoo.zero.update.held_parameters import found_in, held_by

    where = found_in(wrapped.instance or made, parameters, held_by(made))
    if where is not None:
        return Tried(found, f"it knows parameters of the model by {where}", objects=True)
    trial = Trial(build, groups, name)
    why = trial.why_whole()
    asked = frozenset(trial.asked if why is None else ())
    return Tried(found, why, asked=asked, quantises=trial.quantises)


_outcomes: dict[Any, str | None] = {}
_MOST_OUTCOMES = 256


def _why_whole(make: Any, options: Mapping[str, Any], build: Any, name: str) -> str | None:
    """Of an optimizer that looks at nothing but elements and shapes: any two parameters do, and the class and its
    options say what comes out, so that it is tried once."""
    key = _key(make, options)
    if key in _outcomes:
        return _outcomes[key]
    found = Trial(build, [{"params": [nn.Parameter(torch.zeros(3, 4)) for _ in range(2)]}], name).why_whole()
    if key is not None:
        if len(_outcomes) >= _MOST_OUTCOMES:
            _outcomes.clear()
        _outcomes[key] = found
    return found


def _key(make: Any, options: Mapping[str, Any]) -> Any:
    """What the outcome depends on; None where the text of options does not say what they are."""
    tried = in_trial(options)
    if not isinstance(make, type) or not _is_value(tried):
        return None
    # As text: 0, 0.0 and False are equal. The step: somebody may replace it in the class.
    return make, getattr(make, "step", None), torch.get_default_dtype(), repr(sorted(tried.items()))


def _is_value(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_value(inner) for key, inner in value.items())
    if type(value) in (tuple, list):
        return all(map(_is_value, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


def _is_plain(optimizer: Any) -> bool:
    """Whether all that it looks at of parameters is known by its class: their elements, and of whole ones the shape."""
    module = type(optimizer).__module__
    return module.startswith(("torch.optim.", "zoo.optim.")) and not replaced(optimizer)


def replaced(optimizer: Any) -> dict[str, Any]:
    """Methods of the class that stand on the instance: somebody has replaced them. A learning-rate schedule only
    watches."""
    on_class = {name: getattr(type(optimizer), name, None) for name in vars(optimizer)}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if callable(value) and callable(on_class[name]) and _innermost(value) is not _innermost(on_class[name])
    }


def _innermost(function: Any) -> Any:
    while True:
        inner = getattr(function, "__func__", None) or getattr(function, "__wrapped__", None)
        if inner is None:
            return function
        function = inner


def check_learning_rates(groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
    """Raise ValueError for a learning rate that is no finite number."""
    named = [("lr", options)] + [(f"lr of parameter group {i}", group) for i, group in enumerate(groups)]
    for what, of in named:
        lr = of.get("lr")
        if isinstance(lr, torch.Tensor) and lr.numel() == 1 and not lr.is_meta:
            lr = float(lr)
        if isinstance(lr, (int, float)) and not isinstance(lr, bool) and not math.isfinite(lr):
            raise ValueError(
                f"{what} is {lr}: one step would make every parameter infinite or NaN. Give a finite number, such as "
                "1e-3."
            )
