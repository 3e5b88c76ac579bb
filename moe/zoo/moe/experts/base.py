"""What runs on rows that are sorted by expert."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.layout import Box, Boxes, Laid, boxes_of, declare_split, split_of

if TYPE_CHECKING:
    from typing_extensions import Self

Tensor = torch.Tensor

AXIS = "expert"
"""The mesh axis along which ranks have other experts."""

_EXPERT = "_zoo_expert"


def mark_expert(parameter: nn.Parameter) -> None:
    """Say that ``parameter`` belongs to an expert, at any ``ep_size``."""
    parameter.__dict__[_EXPERT] = True


def is_marked(parameter: Any) -> bool:
    """Whether that was said."""
    return bool(getattr(parameter, "__dict__", {}).get(_EXPERT, False))


def check_ep_size(num_experts: int, ep_size: int, of: str = "") -> int:
    """Experts of one rank.

    Raises:
        ValueError: not the same number on each rank; ``of`` says of what.
    """
    if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
        fitting = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ValueError(
            f"{num_experts} experts{of} on ep_size={ep_size} ranks; every rank has the same number of experts, so that "
            f"ep_size is one of {fitting}."
        )
    return num_experts // ep_size


class LocalExperts(nn.Module):
    """Experts first, …, first + num_local - 1 of num_experts, which this rank has: their parameters say so, and take
    their own part of the state of all.

    Attributes:
        num_experts: of the layer, on all ranks. num_local: here. first: the number of the first one here.
    """

    num_experts: int
    num_local: int
    first: int
    _whole: bool | None = None
    """Whether parameters are parts of one tensor over all experts, or tensors of their own; None: not for this."""

    def chunk(self, chunk: int, chunks: int) -> slice:
        """Which of the experts here are those of one of ``chunks`` groups of consecutive ones."""
        size = self.num_local // chunks
        return slice(chunk * size, (chunk + 1) * size)

    def declare(self) -> None:
        """Say what parameters and buffers as they are now are parts of, along the expert axis.

        What says so is an attribute of each parameter, and copies, ``to_empty`` and the like make other parameters.
        """
        if self._whole is None:  # a class of somebody else's, which declares for itself
            return
        for tensor in self._parts():
            if isinstance(tensor, nn.Parameter):
                mark_expert(tensor)
            if self.num_local == self.num_experts:
                continue
            _declare(tensor, self.num_experts if self._whole else None, self.first)

    def _parts(self) -> Iterator[Tensor]:
        """What :meth:`declare` is about."""
        yield from self.parameters()
        yield from self.buffers()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Of tensors over all experts this rank takes its own part."""
        taken = dict(state_dict) if self._whole else state_dict
        for name, parameter in self.named_parameters(recurse=False) if self._whole else ():
            given = state_dict.get(prefix + name)
            if given is not None and given.shape == (self.num_experts, *parameter.shape[1:]):
                taken[prefix + name] = given[self.first : self.first + self.num_local]
        super()._load_from_state_dict(taken, prefix, *args, **kwargs)
        self.declare()  # assign=True makes other parameters

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of copies and pickles."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.declare()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """``to`` and its kind."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.declare()
        return self


def _declare(tensor: Tensor, num_experts: int | None, first: int) -> None:
    """A part, from expert ``first`` on, of one tensor over all experts, or a tensor of its own (None). Along other axes
    it may be a part already."""
    said = split_of(tensor)
    others = [axis for axis in said.axes if axis != AXIS]
    if said.shape is None or not others:
        shape = None if num_experts is None else (num_experts, *tensor.shape[1:])
        offsets = None if shape is None else (first, *(0 for _ in shape[1:]))
        declare_split(tensor, [AXIS, *others], shape=shape, offsets=offsets)
        return
    laid = () if said.box is None else boxes_of(said.box)
    shape = said.shape
    if num_experts is not None:
        shape = (num_experts, *shape[1:])
        laid = tuple(Laid(one.place, Box((first + one.place[0], *one.box.offsets[1:]), one.box.sizes)) for one in laid)
    declare_split(tensor, [AXIS, *others], shape=shape, boxes=Boxes(tuple(tensor.shape), laid))


class Experts(LocalExperts):
    """What a layer of this package has as its experts: called with rows that are sorted by expert.

    Attributes:
        alike: those of all ranks have the same values yet, so that a mesh may say which ones are here.
    """

    alike = False

    def __init__(self, num_experts: int, *, ep_size: int = 1, ep_rank: int = 0) -> None:
        super().__init__()
        self.num_experts, self.num_local = num_experts, check_ep_size(num_experts, ep_size)
        if not 0 <= ep_rank < ep_size:
            raise ValueError(f"expert-parallel rank {ep_rank} of ep_size={ep_size}; it is from 0 to {ep_size - 1}.")
        self.first = ep_rank * self.num_local

    def move(self, ep_rank: int) -> None:
        """Be the experts of this expert-parallel rank, with the values that those here have."""
        self.first = ep_rank * self.num_local
        self.declare()

    def forward(self, x: Tensor, counts: Tensor, which: slice | None = None) -> Tensor:
        """(R, D) of rows that follow each other expert by expert, ``counts`` (num_local,) of each; rows after them are
        0 and stay so. With ``which`` of some of the experts here, whose counts are given."""
        raise NotImplementedError

    def part(self, chunk: int, chunks: int) -> Callable[[Tensor, Tensor], Tensor]:
        """:meth:`forward` of one of ``chunks`` groups of consecutive experts; counts are theirs.

        It is a call of this module, so that whoever gathers its parameters does so on every rank, with rows or without.
        """
        return functools.partial(self, which=self.chunk(chunk, chunks))

    def _declare(self, *, whole: bool) -> None:
        """At the end of a constructor: parameters are parts along the expert axis, of one tensor over all experts
        (``whole``), or tensors of their own."""
        self._whole = whole
        self.declare()
        # assign=True makes other parameters, in children too
        self.register_load_state_dict_post_hook(_declare_again)  # type: ignore[no-untyped-call]


def _declare_again(experts: Experts, keys: object) -> None:
    experts.declare()
