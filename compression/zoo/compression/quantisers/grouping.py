"""Groups of elements that share a scale."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from zoo.compression.place import Place
from zoo.layout import boxes_of


def grouped(value: Tensor, num_groups: int, name: str) -> Tensor:
    """(num_groups, n): a view or copy of ``value`` in fp32 (fp64 as it is), row after row.

    Raises:
        ValueError: the groups would not have one size; the sentence names the tensor.
    """
    if num_groups < 1 or value.numel() % num_groups:
        raise ValueError(
            f"{name} has {tuple(value.shape)} = {value.numel()} elements, which cannot be cut into {num_groups} groups "
            "of one size; give quantize_groups that divides their number."
        )
    wide = value if value.dtype is torch.float64 else value.float()
    return wide.reshape(num_groups, -1)


Lies = Literal["inside", "shared", "odd"]
"""How groups of a whole weight lie in the parts that ranks have: each of them in one part; each part with equally many
elements of every group, group after group; neither."""


def how_groups_lie(place: Place, num_groups: int) -> Lies:
    """Of groups that are runs of the row-major order of the whole weight; the same on all ranks that have parts of it.
    Collective, where it is split."""
    if not place.along or place.shape is None or place.box is None:
        return "inside"
    shape, sizes = place.shape, place.box.sizes
    size = math.prod(shape) // num_groups
    runs = [run for laid in boxes_of(place.box) for run in laid.box.runs_in(shape)]
    inside = all(start % size == 0 and length % size == 0 for start, length in runs)
    dim = next((d for d in range(len(shape)) if sizes[d] != shape[d]), 0)
    shared = num_groups == 1 or (dim > 0 and size % math.prod(shape[dim:]) == 0)
    lacking = torch.tensor([not inside, not shared], dtype=torch.uint8, device=place.ranks.device)
    place.ranks.all_reduce(lacking, "max").wait()
    return "inside" if not lacking[0] else "shared" if not lacking[1] else "odd"


def ends_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest element of each row, (G, 1); infinity and -infinity of rows without any, NaN of rows
    with one."""
    if not rows.shape[1]:
        return rows.new_full((len(rows), 1), torch.inf), rows.new_full((len(rows), 1), -torch.inf)
    lo, hi = torch.aminmax(rows, dim=1, keepdim=True)
    return lo, hi


def check_finite(spans: Tensor, name: str) -> None:
    """Raise ValueError where a group has an infinite element or a NaN, which its span shows.

    On the CPU. On other devices the host would have to wait: there such a group comes out as NaN. Tensors without
    values (meta, fake) are not looked at.
    """
    if spans.device.type == "cpu" and type(spans) is Tensor and not bool(torch.isfinite(spans).all()):
        raise ValueError(
            f"{name} has elements that are infinite or NaN and cannot be quantised. Look at the step before: the "
            "learning rate may be too high, or a loss scale may be missing."
        )
