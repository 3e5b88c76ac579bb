"""The keywords that the constructors of ZeRO optimizers take, for type checkers and for ``help()``.

``ZeroOptions`` (``zero_options.py``) is written by ``make schema`` from the fields of :class:`~zoo.zero.ZeroConfig`;
what each one does is written there. ``OptimizerArguments`` has the arguments of the optimizers of ``torch.optim`` and
``zoo.optim``. An optimizer with other arguments takes them as keywords all the same; ``optimizer_options`` is the way
that a type checker follows.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

import torch

from zoo.zero.options.zero_options import ZeroOptions


class OptimizerArguments(TypedDict, total=False):
    """Arguments of the wrapped optimizer: those of ``torch.optim`` and ``zoo.optim``."""

    lr: float | torch.Tensor
    betas: tuple[float, float] | list[float]
    eps: Any
    weight_decay: float
    momentum: float
    dampening: float
    nesterov: bool
    amsgrad: bool
    maximize: bool
    lr_decay: float
    initial_accumulator_value: float
    alpha: float
    centered: bool
    rho: float
    lambd: float
    t0: float
    momentum_decay: float
    decoupled_weight_decay: bool
    etas: tuple[float, float]
    step_sizes: tuple[float, float]
    ns_coefficients: tuple[float, float, float]
    ns_steps: int
    adjust_lr_fn: str | None
    bias_correction: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool
    master_dtype: torch.dtype | None
    state_dtype: torch.dtype | None


class Keywords(ZeroOptions, OptimizerArguments, total=False):
    """Both."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def shows_keywords(function: _Function) -> _Function:
    """Let ``help()`` and ``inspect.signature`` show every key of :class:`Keywords` in the place of ``**options``."""
    signature = inspect.signature(function)
    own = list(signature.parameters.values())
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind)
        for part in (ZeroOptions, OptimizerArguments)
        for name, kind in typing.get_type_hints(part).items()
    ]
    rest = own[-1].replace(annotation=Any)
    function.__signature__ = signature.replace(parameters=[*own[:-1], *named, rest])  # type: ignore[attr-defined]
    return function


def options_of(cls: type, keywords: Mapping[str, Any], mapping: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keywords and ``optimizer_options`` together.

    Raises:
        ValueError: an argument is in both.
    """
    if mapping is not None and not isinstance(mapping, Mapping):
        raise ValueError(
            f"{cls.__name__} got optimizer_options={mapping!r}, a {type(mapping).__name__}; give a dict of arguments."
        )
    both = sorted(set(keywords) & set(mapping or {}))
    if both:
        raise ValueError(
            f"{cls.__name__} got optimizer_options with {', '.join(both)}, which came as a keyword too; give each "
            "argument once."
        )
    return {**(mapping or {}), **keywords}


def stage_of(cls: type, fixed: int | None, given: int | None) -> int | None:
    """The stage of a class that has one, or the one that was given.

    Raises:
        ValueError: they differ.
    """
    if fixed is not None and given not in (None, fixed):
        raise ValueError(
            f"{cls.__name__} got stage={given}; it is stage {fixed}. Leave stage= out, or use ZeroOptimizer."
        )
    return given if fixed is None else fixed
