"""What ``initialize`` does to a model until its engine ends."""

from __future__ import annotations

from typing import Any

from torch import nn


class _Kept:
    """What shards a model, as long as the model lives; not that of a copy or a pickle of it."""

    def __init__(self, sharded: Any = None) -> None:
        self.sharded = sharded

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> Any:
        return _Kept, ()


def keep(model: nn.Module, sharded: Any) -> None:
    """Whoever lets an engine go has its parameters still, and may give them to another engine."""
    model.__dict__["_zoo_kept"] = _Kept(sharded)


def freeze(parameter: nn.Parameter) -> None:
    """Until its engine ends: it is in no group of the optimizer."""
    parameter.requires_grad_(False)
    parameter._zoo_frozen = True  # type: ignore[attr-defined]


def thaw(model: nn.Module) -> None:
    """Undo :func:`freeze` of all parameters."""
    for parameter in model.parameters():
        if parameter.__dict__.pop("_zoo_frozen", False):
            parameter.requires_grad_(True)
