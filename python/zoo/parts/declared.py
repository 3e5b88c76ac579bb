"""Parts that a model brings along: a layer declares one, and an engine that trains the model builds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PARTS = "_zoo_parts"


def declare_part(module: Any, name: str, make: Callable[..., Any]) -> None:
    """Say that an engine that trains ``module`` has to have the part ``make(model, environment)``.

    Built once for all modules that declare the name, unless the configuration or the user has a part of this name.

    Args:
        make: a class or function of some module, so that the declaration can be copied and pickled with its module.
    """
    module.__dict__[_PARTS] = {**module.__dict__.get(_PARTS, {}), name: make}


def parts_of(model: Any) -> dict[str, Callable[..., Any]]:
    """What modules of ``model`` have declared, by name.

    Raises:
        ValueError: two of them mean different parts by one name.
    """
    found: dict[str, Callable[..., Any]] = {}
    for module in model.modules():
        for name, make in module.__dict__.get(_PARTS, {}).items():
            if found.setdefault(name, make) is not make:
                raise ValueError(f"two modules declare an engine part {name!r}: {found[name]} and {make}.")
    return found
