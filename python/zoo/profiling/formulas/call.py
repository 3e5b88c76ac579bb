"""A call of an operator, by the names of its schema."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from zoo.cost.operators import Work

__all__ = ["Call", "Counted", "Formula", "elements", "fakes", "is_real", "nbytes", "numel", "tensors"]

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


_COMPRESSED = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}


def elements(tensor: torch.Tensor) -> int:
    """Those that are stored; of a sparse tensor the values that it has, those that are equal to 0 among them."""
    if tensor.layout is torch.sparse_coo:
        return int(tensor._values().numel())
    if tensor.layout in _COMPRESSED:
        return int(tensor.values().numel())
    return int(tensor.numel())


def nbytes(tensor: torch.Tensor) -> int:
    """Of what is stored; of a sparse tensor values and indices. 0 of layouts whose memory torch does not tell."""
    found = elements(tensor) * tensor.element_size()
    if tensor.layout is torch.strided:
        return found
    if tensor.layout is torch.sparse_coo:
        return found + int(tensor._indices().numel()) * 8
    if tensor.layout in _COMPRESSED:
        indices = [read(tensor) for read in _COMPRESSED[tensor.layout]]
        return found + sum(int(one.numel()) * one.element_size() for one in indices)
    return 0


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
