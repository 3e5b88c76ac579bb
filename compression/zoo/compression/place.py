"""Where the tensor of a site is: whole on this rank, or a part of what ranks along mesh axes have together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.comm import Communicator
from zoo.layout import Box, Boxes, Part, boxes_of, declare_partial, declare_split, declare_tied, split_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """Of one tensor on one rank.

    Attributes:
        apart: mesh axes along which other ranks have other tensors in its place, or other parts of this one.
        along: mesh axes along which ranks have other parts of this one.
        shape: of the whole, where this is a part of a weight. box: the part.
        partial: mesh axes along which each rank has a summand of the gradient.
        comm: the ranks along ``along``; None until they are known.
    """

    apart: tuple[str, ...] = ()
    along: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    box: Part | None = None
    partial: tuple[str, ...] = ()
    comm: Communicator | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "comm": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def ranks(self) -> Communicator:
        """The ranks that have the parts.

        Raises:
            ValueError: nobody has said which they are.
        """
        if self.comm is None and self.box is not None and self.box.sizes == self.shape and is_alone():
            return Communicator()
        if self.comm is None:
            raise ValueError(
                f"a weight is split along the mesh axes {', '.join(self.along)}, and a transform of it does not know "
                "which ranks have the other parts. An engine with that mesh tells it; in a loop of your own make "
                "CompressionScheduler(model, Ranks.of_mesh(mesh, data_axes=...)) before the first step."
            )
        return self.comm

    def gather(self, value: Tensor) -> Tensor:
        """The whole tensor of the parts that ranks give. Collective. What is whole is returned itself."""
        if self.shape is None or self.box is None or not self.along:
            return value
        wide = value.to(torch.uint8) if value.dtype is torch.bool else value
        whole = wide.new_zeros(self.shape)
        for laid in boxes_of(self.box):
            whole[laid.box.ranges] = wide[laid.here.ranges]
        self.ranks.all_reduce(whole.view(-1)).wait()  # a number and zeros: exact in every dtype
        return whole.to(value.dtype)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole shape, of what spreads over it (sizes of 1) too: a view where the
        part is one box."""
        if self.box is None or not self.along:
            return whole
        wide = [size != 1 for size in whole.shape]

        def narrowed(tensor: Tensor, box: Box) -> Tensor:
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                if wide[dim]:
                    tensor = tensor.narrow(dim, offset, size)
            return tensor

        if isinstance(self.box, Box):
            return narrowed(whole, self.box)
        part = whole.new_empty([size if w else 1 for size, w in zip(self.box.sizes, wide, strict=True)])
        for laid in self.box.laid:
            narrowed(part, laid.here).copy_(narrowed(whole, laid.box))
        return part

    def largest(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The larger element of all ranks that have parts, element by element; what is NaN counts as infinite, so that
        all ranks see it. Collective."""
        together = torch.cat([v.reshape(-1) for v in values]).nan_to_num(nan=torch.inf, posinf=torch.inf)
        self.ranks.all_reduce(together, "max").wait()
        parts = torch.split(together, [v.numel() for v in values])
        return tuple(part.reshape(v.shape) for part, v in zip(parts, values, strict=True))


def is_alone() -> bool:
    """Whether this process is the whole job."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def whole_shape(weight: Tensor) -> tuple[int, ...]:
    """The shape of the whole weight of which this is a part, or is all."""
    return split_of(weight).shape or tuple(weight.shape)


def declare_like(parameter: Tensor, weight: Tensor, name: str) -> None:
    """A new parameter of the shape of a weight is split, summed and tied as the weight is."""
    split = split_of(weight)
    if split.axes:
        boxes = None if split.box is None else Boxes(split.box.sizes, boxes_of(split.box))
        declare_split(parameter, split.axes, shape=split.shape, boxes=boxes)
    _declare_rest(parameter, weight, split.partial, name)


def declare_beside(parameter: Tensor, weight: Tensor, name: str) -> None:
    """A new parameter that is whole on all ranks that have parts of a weight: each gives a summand of its gradient."""
    split = split_of(weight)
    if split.axes and split.shape is None:
        declare_split(parameter, split.axes)
    parts = split.axes if split.shape is not None else ()
    _declare_rest(parameter, weight, tuple(dict.fromkeys((*split.partial, *parts))), name)


def _declare_rest(parameter: Tensor, weight: Tensor, partial: tuple[str, ...], name: str) -> None:
    if partial:
        declare_partial(parameter, partial)
    if split_of(weight).tied:
        declare_tied(parameter, f"{split_of(weight).tied}/{name}")
