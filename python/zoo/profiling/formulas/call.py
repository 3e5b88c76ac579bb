"""A call of an operator, by the names of its schema."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from zoo.cost.operators import Work

__all__ = ["Call", "Counted", "Formula", "fakes", "is_real", "numel", "tensors"]

Counted = Work | tuple[Work, Work]
"""What a call does; of a gradient (what it is for, what it computes again because the forward has not kept it)."""


class Call:
    """An operator, what it was given, and what it returned.

    Attributes:
        name: "namespace::operator", without the overload.
        out: as returned.
    """

    __slots__ = ("_args", "_kwargs", "_places", "name", "out")

    def __init__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """``op`` is an OpOverload, or an operator that takes functions, whose arguments have no names."""
        schema = getattr(op, "_schema", None)
        self.name: str = f"higher_order::{op.name()}" if schema is None else schema.name
        self._places = {} if schema is None else _arguments(op)
        self._args, self._kwargs, self.out = args, kwargs, out

    def __getitem__(self, name: str) -> Any:
        """The argument of that name, or its default."""
        if name in self._kwargs:
            return self._kwargs[name]
        place, default = self._places[name]
        return self._args[place] if place < len(self._args) else default

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(int(n) for n in self[name].shape)

    @property
    def given(self) -> list[Any]:
        """Arguments in their order, without defaults."""
        return [*self._args, *self._kwargs.values()]

    @property
    def inputs(self) -> Iterator[torch.Tensor]:
        """All tensors that were given, those in lists too."""
        yield from tensors(self.given)

    @property
    def outputs(self) -> Iterator[torch.Tensor]:
        """All tensors that were returned."""
        yield from tensors((self.out,))


Formula = Callable[[Call], Counted]
"""What a call does, from shapes; ``read_bytes`` and ``written_bytes`` of 0 are filled in from the tensors."""


@lru_cache(maxsize=1024)
def _arguments(op: Any) -> dict[str, tuple[int, Any]]:
    return {
        argument.name: (place, argument.default_value if argument.has_default_value() else None)
        for place, argument in enumerate(op._schema.arguments)
    }


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """In a tuple or list and what is in it."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def is_real(tensor: torch.Tensor) -> bool:
    """Whether its values can be read."""
    return tensor.device.type != "meta" and not isinstance(tensor, fakes())


def fakes() -> tuple[type, ...]:
    """Classes of tensors without values, where anything has imported them."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return () if module is None else (module.FakeTensor,)


def numel(shape: Sequence[int]) -> int:
    """Elements."""
    return math.prod(int(n) for n in shape)
