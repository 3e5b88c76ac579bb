"""External parameters: used in the forward of a unit that does not own them.

At stage 3 they are found when they are touched: the unit that runs at that moment keeps them whole until its forward
ends, backward makes them whole again before that unit's backward and waits with their reduction until it is finished.
From then on the unit gathers them when it starts. Where nothing refuses access (stages 0 to 2, small parameters that
stay whole) a parameter that is used before, or without, its own unit's forward must be registered by hand, so that its
gradient is not reduced before it has arrived; without that it is an error. So must one that only some ranks use:
finding it is collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from zoo.shard.buckets import bucket_of

if TYPE_CHECKING:
    from zoo.shard.runtime.contexts import Unit

_KEY = "_zoo_external_parameters"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that ``module``'s forward uses ``parameter``, which another module owns.

    May be called at any time outside of a forward, also in ``__init__``, before there is an optimizer. It holds for the
    innermost unit around ``module``.

    Raises:
        ValueError: ``parameter`` is no parameter, or its optimizer was built from a model without ``module``.
    """
    if not isinstance(parameter, nn.Parameter):
        raise ValueError(
            f"register_external_parameter got a {type(parameter).__name__}; it must be an nn.Parameter of the model."
        )
    _check_module("register_external_parameter", module)
    known = module.__dict__.setdefault(_KEY, [])
    if not any(p is parameter for p in known):
        known.append(parameter)
    _apply(module, parameter, present=True)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo :func:`register_external_parameter`, or an automatic registration.

    Raises:
        ValueError: it is not registered.
    """
    _check_module("unregister_external_parameter", module)
    known = module.__dict__.get(_KEY, [])
    before = len(known)
    known[:] = [p for p in known if p is not parameter]
    if not _apply(module, parameter, present=False) and len(known) == before:
        raise ValueError(f"the parameter is not registered as external to this {type(module).__name__}.")


def _check_module(what: str, module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(f"{what} got a {type(module).__name__} as its module; give the nn.Module that reads it.")


def registered(module: nn.Module) -> list[nn.Parameter]:
    """The parameters registered by hand."""
    found: list[nn.Parameter] = module.__dict__.get(_KEY, [])
    return found


def unit_around(module: nn.Module, model: nn.Module, units: Iterable[Unit]) -> Unit:
    """The innermost of these units of a model that has ``module``; names may have changed since they were made.

    Raises:
        ValueError: the module is not part of the model.
    """
    modules = dict(model.named_modules())
    path = next((name for name, found in modules.items() if found is module), None)
    if path is None:
        raise ValueError(f"this {type(module).__name__} is not part of the model of the optimizer.")
    hooked = {id(unit.module): unit for unit in units}
    while id(modules[path]) not in hooked:
        path = path.rpartition(".")[0]
    return hooked[id(modules[path])]


def _apply(module: nn.Module, parameter: nn.Parameter, *, present: bool) -> bool:
    bucket = bucket_of(parameter)
    owner = bucket.owner() if bucket is not None else None
    return owner is not None and owner.runtime.set_external(module, bucket, present=present)
