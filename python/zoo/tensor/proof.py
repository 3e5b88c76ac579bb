"""A plan is proved before a weight is read: a small model of the same class computes the same whole and in parts.

Names cannot say everything: slopes of heads, sinks, biases by head, norms over all heads. So the model's own class is
built from a shrunken configuration (:mod:`zoo.tensor.shrinking`) with random parameters, norms and biases too, and
split over ranks that are threads (:mod:`zoo.tensor.lockstep`). Compared are outputs with padding on the left, a step of
decoding with its cache, and gradients.

Everything is computed in fp64: while it is proved, what the model's code casts to fp32 is cast to fp64. Sums of some
hundreds of terms in two layers then round to about 1e-14 of the largest number, and a wrong cut changes digits that one
can see; the bound is between the two.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from zoo.comm import Communicator
from zoo.layout import boxes_of, split_of
from zoo.tensor import lockstep
from zoo.tensor.plans import Plan
from zoo.tensor.shrinking import shrunken
from zoo.tensor.splitting import split_alone

BOUND = 1e-9
"""Of a difference, as a share of the largest number that it could have changed."""
_BATCH, _TOKENS, _PADS = 2, 6, 2


@dataclass(frozen=True)
class Proof:
    """What was compared, and the largest difference as a share of the largest number.

    Attributes:
        plan: with the sizes of the small model. degree: ranks. outputs, gradients: the differences; gradients is None
            where they were not asked for.
    """

    plan: Plan
    degree: int
    outputs: float
    gradients: float | None


_PROVED: dict[Any, Proof | str] = {}


def prove(
    model: nn.Module | type[nn.Module], config: Any, plan: Plan, degree: int, *, training: bool = True, grain: int = 1,
    sequence: bool = False,
) -> Proof:  # fmt: skip
    """Compare a small model of the same class, whole and split by ``plan``. No rank talks to another one.

    Args:
        model: of transformers, or its class. config: its configuration.
        plan: with the sizes of ``config``. degree, training, grain, sequence: as :func:`zoo.tensor.split` gets them.

    Returns:
        What was found; the same plan of the same model is proved once in a process.

    Raises:
        ValueError: the split model fails, or computes something else: with what differs, the degree and the number.
    """
    kind = model if isinstance(model, type) else type(model)
    how = getattr(config, "_attn_implementation", None)  # which is not in the JSON
    key = (kind, config.to_json_string(use_diff=False), how, plan, degree, training, grain, sequence)
    if key not in _PROVED:
        try:
            _PROVED[key] = _prove(kind, config, plan, degree, training, grain, sequence)
        except ValueError as error:
            _PROVED[key] = str(error)
    found = _PROVED[key]
    if isinstance(found, str):
        raise ValueError(found)
    return found


def prove_on(
    model: nn.Module, plan: Plan, degree: int, *args: Any, training: bool = True, grain: int = 1, **kwargs: Any
) -> Proof:  # fmt: skip
    """Compare copies of any model in fp64, whole and split by ``plan``, on an example. No rank talks to another one.

    Args:
        model: it is copied, and run in evaluation. args, kwargs: its inputs.
        plan, degree, training, grain: as :func:`prove`.

    Raises:
        ValueError: as :func:`prove`.
    """
    given, named = doubled((args, kwargs))
    return prove_run(model, plan, degree, lambda model: model(*given, **named), training=training, grain=grain)


def prove_run(
    model: nn.Module, plan: Plan, degree: int, run: Callable[[nn.Module], Any], *, training: bool = True, grain: int = 1
) -> Proof:  # fmt: skip
    """As :func:`prove_on`, of what ``run`` computes with a copy of the model."""

    def made() -> tuple[nn.Module, list[tuple[str, Step]]]:
        def step(model: nn.Module, before: Mapping[str, Any]) -> Mapping[str, Any]:
            return {f"output {number}": value for number, value in enumerate(tree_leaves(run(model)))}

        return copy.deepcopy(model).double().eval(), [("", step)]

    what = f"plan {plan.name!r} of {type(model).__name__} at degree {degree}"
    return _compare(made, "the model in fp64", plan, degree, what, training, grain, sequence=False)


def doubled(given: Any) -> Any:
    """The same with what is of a floating-point type in fp64."""
    return tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, given)


def _prove(
    kind: type[nn.Module], config: Any, plan: Plan, degree: int, training: bool, grain: int, sequence: bool
) -> Proof:  # fmt: skip
    what = f"plan {plan.name!r} of {kind.__name__} at degree {degree}"
    small = shrunken(config, plan, degree, grain)

    def made() -> tuple[nn.Module, list[tuple[str, Step]]]:
        whole = random_model(kind, small.config)
        return whole, computations(whole)

    who = f"a small {kind.__name__} in fp64"
    return _compare(made, who, small.plan, degree, what, training, grain, sequence)


def _compare(
    made: Callable[[], tuple[nn.Module, list[tuple[str, Step]]]], who: str, plan: Plan, degree: int, what: str,
    training: bool, grain: int, sequence: bool,
) -> Proof:  # fmt: skip
    """``made``: the model and what it computes. ``who`` and ``what`` say in errors which model and which plan it is."""

    def unsplit(_: Communicator) -> tuple[list[nn.Module], list[tuple[str, Step]], _Computed]:
        whole, steps = made()
        copies = [copy.deepcopy(whole) for _ in range(degree)]
        found = _compute(whole, steps, training)
        if not found.outputs or not all(value.isfinite().all() for value in found.outputs.values()):
            raise ValueError(f"its outputs are {', '.join(found.outputs) or 'none'}, and not finite numbers")
        return copies, steps, found

    try:  # in a thread of its own: no context of the caller's counts there
        ((copies, steps, expected),) = lockstep.run(1, unsplit)
    except Exception as error:
        raise ValueError(f"{what} cannot be proved: {who} fails unsplit ({type(error).__name__}: {error}).") from error
    scale = max((g.abs().max().item() for g in expected.gradients.values()), default=0.0)

    def one(comm: Communicator) -> tuple[float, float]:
        mine = copies[comm.rank]
        try:
            split_alone(mine, plan, comm, training=training, grain=grain, sequence=sequence)
        except ValueError as error:  # plan and degree do not fit, which says what to do
            raise _Different(f"{what} is refused: {error}") from None
        found = _compute(mine, steps, training)
        outputs = 0.0
        for name, value in expected.outputs.items():
            outputs = max(outputs, _near(found.outputs[name], value, value.abs().max().item(), name, what))
        gradients = 0.0
        for name, parameter in mine.named_parameters() if training else ():
            for part, there in _parts(parameter, found.gradients.get(name), expected.gradients.get(name), comm):
                gradients = max(gradients, _near(part, there, scale, f"the gradient of {name}", what))
        return outputs, gradients

    try:
        found = lockstep.run(degree, one)
    except _Different as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        raise ValueError(
            f"{what} is refused: the split model fails ({type(error).__name__}: {error}). A rule, a count or a take is "
            "wrong or missing."
        ) from error
    outputs, gradients = (max(differences) for differences in zip(*found, strict=True))
    return Proof(plan, degree, outputs, gradients if training else None)


class _Different(Exception):
    """Ranks compute something else, or cannot be made; with the whole sentence."""


def _near(found: torch.Tensor, expected: torch.Tensor, scale: float, name: str, what: str) -> float:
    """The largest difference as a share of ``scale``."""
    if found.shape != expected.shape:
        raise _Different(
            f"{what} is refused: {name} has the shape {tuple(found.shape)}, and {tuple(expected.shape)} unsplit."
        )
    share = (found - expected).abs().max().item() / max(scale, 1e-30) if found.numel() else 0.0
    if not share <= BOUND:
        raise _Different(
            f"{what} is refused: {name} differs from the unsplit model's by {share:.3g} of the largest number, and "
            f"rounding explains {BOUND:.0e}."
        )
    return share


def random_model(kind: type[nn.Module], config: Any) -> nn.Module:
    """A model in fp64 whose parameters are random, each one, and the same ones each time; not for training."""
    with torch.random.fork_rng(devices=[]), exact():
        torch.default_generator.manual_seed(0)  # torch.manual_seed would set those of devices too
        model = kind(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim < 2:  # norms and biases: near what they begin with
                    parameter.add_(0.3 * torch.randn(parameter.shape, dtype=parameter.dtype))
                else:
                    parameter.copy_(torch.randn(parameter.shape, dtype=parameter.dtype) / parameter.shape[-1] ** 0.5)
    return model


Step = Callable[[nn.Module, Mapping[str, Any]], Mapping[str, Any] | None]


def computations(model: nn.Module) -> list[tuple[str, Step]]:
    """What is computed: (its name, a function of the model and the outputs of the one before, None for nothing)."""
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    cache = next((name for name in ("cache", "past_key_values") if name in accepted), None)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (_BATCH, _TOKENS + 1), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :_PADS] = 0
    then: dict[str, Any] = {} if cache is None else {"use_cache": True}
    if getattr(config, "add_cross_attention", False):
        then["encoder_hidden_states"] = torch.randn(
            _BATCH, _TOKENS - 1, config.hidden_size, generator=generator, dtype=torch.float64
        )
    always = {key: value for key, value in then.items() if key != "use_cache"}
    if config.is_encoder_decoder:
        other = torch.randint(config.vocab_size, (_BATCH, _TOKENS + 1), generator=generator)

        def first(model: nn.Module, before: Mapping[str, Any]) -> Any:
            return model(input_ids=ids, attention_mask=mask, decoder_input_ids=other[:, :-1], **then)

        def second(model: nn.Module, before: Mapping[str, Any]) -> Any:
            given = {"encoder_outputs": (before["encoder_last_hidden_state"],), str(cache): before[str(cache)]}
            return model(attention_mask=mask, decoder_input_ids=other[:, -1:], **given)
    else:

        def first(model: nn.Module, before: Mapping[str, Any]) -> Any:
            return model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], **then)

        def second(model: nn.Module, before: Mapping[str, Any]) -> Any:
            return model(input_ids=ids[:, -1:], attention_mask=mask, **{str(cache): before[str(cache)]}, **always)

    def decode(model: nn.Module, before: Mapping[str, Any]) -> Any:
        return None if before.get(str(cache)) is None else second(model, before)

    return [("", first), (" of a decoding step", decode)]


@dataclass(frozen=True)
class _Computed:
    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def _compute(model: nn.Module, steps: list[tuple[str, Step]], training: bool) -> _Computed:
    """Outputs of all steps, and the gradients of a random sum of those of the first one."""
    outputs: dict[str, torch.Tensor] = {}
    before: Mapping[str, Any] = {}
    with exact():
        for name, step in steps:
            with torch.no_grad():
                before = step(model, before) or {}
            outputs |= {f"{key}{name}": value for key, value in _floats(before)}
        if training:
            draw, found = torch.Generator().manual_seed(2), dict(_floats(steps[0][1](model, {}) or {}))
            weights = [torch.randn(value.shape, dtype=value.dtype, generator=draw) for value in found.values()]
            torch.autograd.backward(list(found.values()), weights)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return _Computed(outputs, gradients)


def _floats(found: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Logits, or whatever a model without a head returns, by name."""
    for name, value in found.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield name, value


def _parts(
    parameter: nn.Parameter, found: torch.Tensor | None, expected: torch.Tensor | None, comm: Communicator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(part of this rank's gradient, the same of the whole one); partial gradients are added up over ranks first."""
    said = split_of(parameter)
    mine = torch.zeros_like(parameter) if found is None else found
    if said.partial:
        comm.all_reduce(mine).wait()
    if said.box is None:
        yield mine, torch.zeros_like(mine) if expected is None else expected
        return
    for laid in boxes_of(said.box):
        part = mine[laid.here.ranges]
        yield part, torch.zeros_like(part) if expected is None else expected[laid.box.ranges]


class _Double(TorchFunctionMode):
    """Casts to fp32 are casts to fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        given = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*args, **given)


@contextmanager
def exact() -> Iterator[None]:
    """What a model's code casts to fp32 is cast to fp64."""
    with _Double():
        yield
