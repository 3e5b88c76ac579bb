"""What runs on rows that are sorted by expert."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.layout import declare_split

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


class Experts(nn.Module):
    """Experts first, …, first + num_local - 1 of num_experts; this rank has these.

    Attributes:
        num_experts: of the layer, on all ranks. num_local: here. first: the number of the first one here.
    """

    _whole: bool | None = None

    def __init__(self, num_experts: int, *, ep_size: int = 1, ep_rank: int = 0) -> None:
        super().__init__()
        if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
            fitting = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"{num_experts} experts on ep_size={ep_size} ranks; every rank has the same number of experts, so "
                f"that ep_size is one of {fitting}."
            )
        if not 0 <= ep_rank < ep_size:
            raise ValueError(f"expert-parallel rank {ep_rank} of ep_size={ep_size}; it is from 0 to {ep_size - 1}.")
        self.num_experts, self.num_local = num_experts, num_experts // ep_size
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
        size = self.num_local // chunks
        return functools.partial(self, which=slice(chunk * size, (chunk + 1) * size))

    def _declare(self, *, whole: bool) -> None:
        """At the end of a constructor: parameters are parts along the expert axis, of one tensor over all experts
        (``whole``), or tensors of their own."""
        self._whole = whole
        self.declare()
        # assign=True makes other parameters
        self.register_load_state_dict_post_hook(_declare_again)  # type: ignore[no-untyped-call]

    def declare(self) -> None:
        """Say so of the parameters and buffers as they are now.

        What says so is an attribute of each parameter, and copies, ``to_empty`` and the like make other parameters.
        """
        if self._whole is None:  # a class of somebody else's, which declares for itself
            return
        for parameter in self.parameters():
            mark_expert(parameter)
            self._declare_part(parameter)
        for buffer in self.buffers():
            self._declare_part(buffer)

    def _declare_part(self, tensor: Tensor) -> None:
        if self.num_local == self.num_experts:
            return
        if self._whole:
            shape = (self.num_experts, *tensor.shape[1:])
            declare_split(tensor, [AXIS], shape=shape, offsets=(self.first, *(0 for _ in shape[1:])))
        else:
            declare_split(tensor, [AXIS])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of copies and pickles."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.declare()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Experts:
        """``to`` and its kind."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.declare()
        return self


def _declare_again(experts: Experts, keys: object) -> None:
    experts.declare()
