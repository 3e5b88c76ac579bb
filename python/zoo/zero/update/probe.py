"""What an optimizer is like, found out by trying it on small tensors."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

LR = 1e-2
"""The learning rate of a trial: a schedule may begin with 0, and what is multiplied by little shows little."""


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
class Keeps:
    """What an optimizer keeps of a tensor: states with one element for each of it, and bytes of all the others.

    ``numbers``: the names of those that are a single number; ``others``: the sizes of tensors of other shapes.
    """

    states: dict[str, torch.dtype]
    scalar_bytes: int
    numbers: frozenset[str] = frozenset()
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Of all states beside a master, which is the parameter."""
        return (self.states.keys() | self.numbers | self.others.keys()) - {"master"}

    @property
    def bytes_per_element(self) -> int:
        """Of the states."""
        return sum(dtype.itemsize for dtype in self.states.values())


def what_it_keeps(
    build: Callable[[list[torch.Tensor]], Any], dtype: torch.dtype, tensor: torch.Tensor | None = None
) -> Keeps:
    """From one step on ``tensor``, or a matrix of ``dtype``."""
    tensor = torch.ones(2, 3, dtype=dtype).requires_grad_() if tensor is None else tensor
    optimizer = build([tensor])
    tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    return kept_of(tensor, optimizer.state[tensor])


def kept_of(tensor: torch.Tensor, entries: Mapping[str, Any]) -> Keeps:
    """What ``entries``, the states of ``tensor``, are."""
    kept = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor)}
    whole = {k: v.dtype for k, v in kept.items() if v.shape == tensor.shape}
    numbers = {k for k, v in entries.items() if isinstance(v, (int, float)) or (k in kept and v.numel() == 1)}
    others = {k: v.numel() for k, v in kept.items() if k not in whole and k not in numbers}
    return Keeps(whole, sum(v.nbytes for k, v in kept.items() if k not in whole), frozenset(numbers), others)


def counts_calls(build: Callable[[list[torch.Tensor]], Any]) -> bool:
    """Whether a step changes numbers that the optimizer has as attributes: its update cannot be cut into several."""
    tensor = torch.ones(2).requires_grad_()
    optimizer = build([tensor])
    tensor.grad = torch.ones_like(tensor)
    before = _numbers_of(optimizer)
    optimizer.step()
    return _numbers_of(optimizer) != before


def takes_found_inf(build: Callable[[list[torch.Tensor]], Any], num_groups: int) -> bool:
    """Whether a step with the attribute ``found_inf`` at 1 changes nothing, and at 0 what a step without it changes.

    That is how torch.amp.GradScaler tells optimizers that say ``_step_supports_amp_scaling`` (torch's with fused=True,
    whose kernels look at it on the device). It is tried all the same: a class that is derived from one of them may do
    more in its step.

    Args:
        build: from a tensor for each group.
    """
    found = []
    for flags in ((None, None), (None, 0.0), (None, 0.0, 1.0)):
        tensors = [torch.linspace(1, 2, 3).requires_grad_() for _ in range(num_groups)]
        optimizer = build(tensors)
        old = "grad_scaler" in inspect.signature(optimizer.step).parameters  # an earlier way to tell them
        if old or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        for number, flag in enumerate(flags):
            for tensor in tensors:
                tensor.grad = torch.linspace(-1, 3, 3) * (number + 1)
            if flag is not None:
                optimizer.found_inf = torch.tensor(flag)
            try:
                optimizer.step()
            except Exception:  # whatever it says: it does not take it
                return False
            if flag is not None:
                del optimizer.found_inf
        found.append(_all_of(optimizer, tensors))
    return found[0] == found[1] == found[2]


def _all_of(optimizer: Any, tensors: list[torch.Tensor]) -> list[Any]:
    """Everything that a step may change, to be compared."""
    entries = [sorted(optimizer.state.get(t, {}).items()) for t in tensors]
    states = [[(k, v.tolist() if isinstance(v, torch.Tensor) else repr(v)) for k, v in found] for found in entries]
    options = [sorted((k, repr(v)) for k, v in g.items() if k != "params") for g in optimizer.param_groups]
    return [[t.tolist() for t in tensors], states, options, _numbers_of(optimizer)]


def _numbers_of(optimizer: Any) -> dict[str, float]:
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, (int, float))}


# Whether it can have flat segments ------------------------------------------------------------------------------------


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
        NotImplementedError: a step ends with an exception.
        Exception: what its constructor says of its options or of a group's.
    """
    groups, options, make = wrapped.groups, wrapped.options, wrapped.make
    check_learning_rates(groups, options)
    if wrapped.cannot_rebuild is not None:
        return Tried([_without_params(g) for g in groups], wrapped.cannot_rebuild, objects=True)

    def build(of: list[dict[str, Any]]) -> Any:
        return make(of, **in_trial(options))

    whole = bool(getattr(make, "needs_whole_tensors", False))
    shape = (2, 2) if whole else (2,)
    try:
        made = make([{**_without_params(g), "params": [nn.Parameter(torch.zeros(shape))]} for g in groups], **options)
    except ValueError:  # some take matrices alone
        made = make([{**_without_params(g), "params": [nn.Parameter(torch.zeros(2, 2))]} for g in groups], **options)
    found = [_without_params(g) for g in made.param_groups]
    if whole:
        return Tried(found)
    name = getattr(make, "__name__", str(make))
    if _is_plain(wrapped.instance or made):
        return Tried(found, _looks_further(build, name))
    from zoo.zero.update.trial import Trial, found_in, held_by

    where = found_in(wrapped.instance or made, (p for g in groups for p in g["params"]), held_by(made))
    if where is not None:
        return Tried(found, f"it knows parameters of the model by {where}", objects=True)
    trial = Trial(build, groups, name)
    why = trial.why_whole()
    asked = frozenset(trial.asked if why is None else ())
    return Tried(found, why, asked=asked, quantises=trial.quantises)


def _looks_further(build: Callable[[list[dict[str, Any]]], Any], name: str) -> str | None:
    """Why flat segments will not do, as a clause: two small tensors are updated twice, whole and laid flat and cut
    elsewhere, and the results must agree."""
    generator = torch.Generator().manual_seed(0)
    values, *grads = (torch.randn(24, generator=generator) for _ in range(3))
    results: list[torch.Tensor] = []
    for cuts, shape in (([12, 12], (3, 4)), ([7, 17], (-1,))):
        tensors = [part.clone().view(shape).requires_grad_() for part in torch.split(values, cuts)]
        if not results:
            optimizer = build([{"params": tensors}])  # options that it refuses are not about flat tensors
        try:
            if results:
                optimizer = build([{"params": tensors}])
            for grad in grads:
                for tensor, part in zip(tensors, torch.split(grad, cuts), strict=True):
                    tensor.grad = part.clone().view(shape)
                optimizer.step()
        except Exception as error:
            if not results:
                raise step_fails(name, error) from error
            return on_flat(error)
        results.append(torch.cat([t.detach().flatten() for t in tensors]))
    close = torch.allclose(results[0], results[1], rtol=1e-6, atol=1e-7, equal_nan=True)
    return None if close else OTHER_ELEMENTS


OTHER_ELEMENTS = "its update of an element depends on other elements, or on what a parameter is beside them"


def on_flat(error: Exception) -> str:
    """Why, of an optimizer whose step fails there."""
    return f"a step on flat tensors ended with {type(error).__name__}: {error}"


def step_fails(name: str, error: Exception) -> NotImplementedError:
    """Of an optimizer whose step fails anywhere."""
    return NotImplementedError(
        f"{name} cannot run under a ZeRO optimizer: a step ended with {type(error).__name__}: {error}. It must work "
        "without a closure, on dense gradients."
    )


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


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


def fresh(value: Any) -> Any:
    """A value that an optimizer may change, for a trial."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if not isinstance(value, nn.Parameter) else value
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def in_trial(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for a trial: copies, with a learning rate that shows what it does."""
    found = {key: fresh(value) for key, value in options.items()}
    lr = found.get("lr")
    if isinstance(lr, torch.Tensor) and lr.numel() == 1 and lr.is_floating_point():
        found["lr"] = torch.full_like(lr, LR)
    elif isinstance(lr, (int, float)) and not isinstance(lr, bool):
        found["lr"] = LR
    return found


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
