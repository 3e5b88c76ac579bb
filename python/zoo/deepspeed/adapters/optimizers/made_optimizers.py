"""Optimizers of the section ``optimizer`` that are made of the model's parameters: those of the package mup, which has
rates by the width of each layer, and those of ``torch.optim`` that have no name in zoo's registry."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zoo import registry
from zoo.config import ConfigError
from zoo.deepspeed.adapters.configuration.plain_values import options_as_meant

NAMES = {name.lower(): name for name in ("MuAdam", "MuAdamW", "MuSGD")}


def maker_of(section: Mapping[str, Any]) -> Any:
    """What makes the optimizer of a section: (options, model, parameters) → optimizer; None where zoo has the name."""
    given = section.get("type")
    if not isinstance(given, str):
        return None
    if given.lower() in NAMES:
        return functools.partial(of_widths, NAMES[given.lower()])
    found = getattr(torch.optim, given, None)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer) or found is torch.optim.Optimizer:
        return None
    return None if given in registry.names("optimizer") else functools.partial(of_torch, found)


def of_torch(
    cls: type[torch.optim.Optimizer], options: Mapping[str, Any], model: nn.Module, parameters: Iterable[Any] | None
) -> torch.optim.Optimizer:  # fmt: skip
    """An instance of a class of ``torch.optim``.

    Raises:
        ConfigError: options that it does not take.
    """
    given = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
    try:
        return cls(given, **options_as_meant(cls, options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params of {cls.__name__}: {error}") from error


def of_widths(
    name: str, options: Mapping[str, Any], model: nn.Module, parameters: Iterable[Any] | None
) -> torch.optim.Optimizer:  # fmt: skip
    """What mup makes of the parameters, in groups by how wide they are.

    Raises:
        ConfigError: the package is not there, options that it does not take, or parameters without ``infshape``.
    """
    try:
        made = getattr(importlib.import_module("mup"), name)
    except ImportError as error:
        raise ConfigError(
            f'optimizer.type "{name}" is a class of the package mup, which cannot be imported ({error}). Install it '
            "(pip install mup), or choose another type."
        ) from error
    if "max_grad_norm" in options:
        raise ConfigError(
            f"optimizer.params.max_grad_norm is no option of {name}; write gradient_clipping at the root, which clips "
            "the same norm."
        )
    given = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
    given = [member[1] if isinstance(member, tuple) else member for member in given]
    flat = [p for member in given for p in (member["params"] if isinstance(member, Mapping) else [member])]
    if not all(hasattr(p, "infshape") for p in flat):
        raise ConfigError(
            f'optimizer.type "{name}" wants the infshape of each parameter: call mup.set_base_shapes(model, base) '
            "before initialize()."
        )
    try:
        optimizer: torch.optim.Optimizer = made(given, **options_as_meant(getattr(torch.optim, name[2:]), options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params of {name}: {error}") from error
    return optimizer
