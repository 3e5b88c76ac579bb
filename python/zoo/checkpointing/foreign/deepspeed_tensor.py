"""Checkpoints of DeepSpeed whose matrices were cut over tensor-parallel ranks: the parts of all ranks, put together.

AutoTP writes ``universal_checkpoint_info`` into the model's files, and Megatron-DeepSpeed does. It has patterns of
parameter names: which parameters all ranks have alike, which are cut along dim 1, which have several blocks, each of
which was dealt for itself; all others are cut along dim 0. A rank's part may be larger than another's.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.pieces import BoxPart, ForeignCheckpoint, Run
from zoo.layout import Box

INFO = "universal_checkpoint_info"
_SAME = ("tp_replicated_parameter_patterns", "pipeline_replicated_parameter_patterns")
_ROWS = "parameter_with_row_parallelism_patterns"
_BLOCKS, _TWO_BLOCKS = "parameter_with_sub_params", "parameter_with_2_sub_params_cat_dim_0"
_WIDTHS = "sub_param_shard_widths"
_REFUSED = {
    "autotp_unsupported_parameter_patterns": "DeepSpeed itself does not say how its parts fit together",
    "parameter_to_average_patterns": "ranks have values of their own, of which DeepSpeed takes the mean",
}
# Each alternative begins with another character, so that a long pattern is read once.
_PLAIN = re.compile(r"\^?(?:(?:\\[^A-Za-ce-z0-9]|\w|\.|-)[*+]?)*\$?")
_MOST_NAME = 512


@dataclass(frozen=True)
class _Part:
    """A box of one rank's tensor, read as if it were stored alone."""

    source: ForeignCheckpoint
    name: str
    role: str
    box: Box

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = vars(torch)[self.source.roles[self.name][self.role]]
        return found

    @property
    def numel(self) -> int:
        return self.box.numel

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.sizes

    def read(self, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Elements [start, start + length) of it, in row-major order."""
        length = self.numel - start if length is None else length
        whole = self.source.shapes[self.name]
        if self.box.is_run_in(whole):
            first = Box.whole(whole).number_of(self.box.offsets) if self.box.numel else 0
            return self.source.read(self.name, self.role, first + start, length)
        return self.source.read_box(self.name, self.role, self.box).reshape(-1)[start : start + length]


def join(found: ForeignCheckpoint, ranks: Sequence[ForeignCheckpoint], info: Any) -> None:
    """Add to ``found`` the whole tensors of which ``ranks`` have parts, in the order of the tensor-parallel ranks.

    Raises:
        CheckpointError: a parameter of which ``info`` says nothing that can be read, or that does not fit together.
    """
    if not isinstance(info, Mapping):
        raise CheckpointError(f"{INFO} of {found.tag!r} is a {type(info).__name__}, not a dict")
    names = list(dict.fromkeys(name for rank in ranks for name in rank.shapes))
    for name in names:
        lacking = [number for number, rank in enumerate(ranks) if name not in rank.shapes]
        if lacking:
            raise CheckpointError(f"tensor-parallel ranks {lacking} of {found.tag!r} have no part of {name!r}")
        roles = [sorted(rank.roles[name]) for rank in ranks]
        if other := next((said for said in roles if said != roles[0]), None):
            raise CheckpointError(
                f"tensor-parallel ranks of {found.tag!r} have {name!r} as {', '.join(roles[0])}, and as "
                f"{', '.join(other)}"
            )
        for role in ranks[0].roles[name]:
            _add(found, ranks, info, name, role)
    for rank in ranks:
        for key, value in rank.scalars.items():
            if found.scalars.setdefault(key, value) != value:
                raise CheckpointError(f"tensor-parallel ranks of {found.tag!r} have several values of {key!r}")
    found.meta = ranks[0].meta
    found.world_size = sum(rank.world_size for rank in ranks)


def _add(
    found: ForeignCheckpoint, ranks: Sequence[ForeignCheckpoint], info: Mapping[Any, Any], name: str, role: str
) -> None:  # fmt: skip
    shapes = [rank.shapes[name] for rank in ranks]
    if role == "buffer" or not shapes[0] or any(_fits(info.get(key), name, key) for key in _SAME):
        if len(set(shapes)) > 1:
            raise CheckpointError(f"all ranks of {found.tag!r} have {name!r}, and of several shapes: {shapes}")
        whole = _Part(ranks[0], name, role, Box.whole(shapes[0]))
        found.add(name, role, shapes[0], [Run(0, whole.numel, whole)])
        return
    for key, why in _REFUSED.items():
        if _fits(info.get(key), name, key):
            raise CheckpointError(f"{name!r} of {found.tag!r} is in {key}: {why}; it is not read")
    dims = {len(shape) for shape in shapes}
    if len(dims) > 1:
        raise CheckpointError(f"ranks of {found.tag!r} have parts of {name!r}, and of several shapes: {shapes}")
    dim, runs = _runs(info, name, shapes)
    total = sum(stop - start for mine in runs for start, stop in mine)
    shape = (*shapes[0][:dim], total, *shapes[0][dim + 1 :])
    parts = []
    for rank, mine, own in zip(ranks, runs, shapes, strict=True):
        if sum(stop - start for start, stop in mine) != own[dim]:
            raise CheckpointError(
                f"{INFO} of {found.tag!r} deals {mine} of {name!r} to a rank that has the shape {own} of it"
            )
        at = 0
        for start, stop in mine:
            here, there = [0] * len(own), [0] * len(own)
            here[dim], there[dim] = at, start
            sizes = (*own[:dim], stop - start, *own[dim + 1 :])
            part = _Part(rank, name, role, Box(tuple(here), sizes))
            parts.append(BoxPart(Box(tuple(there), sizes), part))
            at += stop - start
    found.add_boxes(name, role, shape, parts, parts[0].source.dtype)


def _runs(
    info: Mapping[Any, Any], name: str, shapes: Sequence[tuple[int, ...]]
) -> tuple[int, list[list[tuple[int, int]]]]:  # fmt: skip
    """The dim that was cut, and what each rank has of the whole one, in its order, as [start, stop)."""
    entries = info.get(_BLOCKS) or ()
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in entries):
        raise CheckpointError(f"{_BLOCKS} is {_shown(entries)}; it takes a list of dicts")
    entry = next((entry for entry in entries if _fits(entry.get("patterns"), name, _BLOCKS)), None)
    if entry is None and _fits(info.get(_TWO_BLOCKS), name, _TWO_BLOCKS):
        halves = sum(shape[0] for shape in shapes) // 2
        entry = {"shape": [(halves, halves), *shapes[0][1:]], "partition_dim": 0}
    if entry is None:
        dim = 1 if _fits(info.get(_ROWS), name, _ROWS) and len(shapes[0]) > 1 else 0
        ends = list(itertools.accumulate(shape[dim] for shape in shapes))
        return dim, [[(end - shape[dim], end)] for end, shape in zip(ends, shapes, strict=True)]
    shape, at = entry.get("shape"), entry.get("partition_dim", 0)
    shape = list(shape) if isinstance(shape, (list, tuple)) else []
    blocks = shape[at] if type(at) is int and 0 <= at < len(shape) else None
    matrix = len(shapes[0]) > 1
    columns = matrix and at == len(shape) - 1
    outer, inner = ([], []) if columns else (shape[:at], shape[at + 1 : len(shape) - matrix])
    good = isinstance(blocks, (list, tuple)) and all(_is_size(n) for n in (*blocks, *outer, *inner))
    if not good or not isinstance(blocks, (list, tuple)):
        raise CheckpointError(
            f"{_BLOCKS} says {_shown(entry)} of {name!r}; it takes the sizes of blocks at partition_dim"
        )
    dealt_dim = len(shapes[0]) - 1 if columns else 0
    there, made = sum(own[dealt_dim] for own in shapes), math.prod((*outer, sum(blocks), *inner))
    if made != there:  # which also bounds what is laid out below
        raise CheckpointError(
            f"{_BLOCKS} says {_shown(entry)} of {name!r}, which makes {made} of a dim of {there} over all ranks"
        )
    widths, within = _widths(info, name, blocks, len(shapes)), math.prod(inner)
    found: list[list[tuple[int, int]]] = [[] for _ in shapes]
    base = 0
    for _ in range(math.prod(outer)):
        for block, dealt in zip(blocks, widths, strict=True):
            for rank, (end, width) in enumerate(zip(itertools.accumulate(dealt), dealt, strict=True)):
                if width:
                    found[rank].append((base + (end - width) * within, base + end * within))
            base += block * within
    return dealt_dim, found


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**32


def _is_width(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}…"


def _widths(info: Mapping[Any, Any], name: str, blocks: Sequence[int], ranks: int) -> list[list[int]]:
    """Of each block, how much of it each rank has; equal shares where that is not said."""
    said = info.get(_WIDTHS)
    for pattern, widths in said.items() if isinstance(said, Mapping) else ():
        if _fits([pattern], name, _WIDTHS):
            good = isinstance(widths, (list, tuple)) and all(
                isinstance(dealt, (list, tuple)) and len(dealt) == ranks and all(map(_is_width, dealt))
                for dealt in widths
            )
            if not good or [sum(dealt) for dealt in widths] != list(blocks):
                raise CheckpointError(
                    f"{_WIDTHS} says {_shown(widths)} of {name!r}, whose blocks are {_shown(list(blocks))}, over "
                    f"{ranks} ranks"
                )
            return [list(dealt) for dealt in widths]
    if any(block % ranks for block in blocks):
        raise CheckpointError(f"{name!r} has blocks of {_shown(list(blocks))} over {ranks} ranks, and no {_WIDTHS}")
    return [[block // ranks] * ranks for block in blocks]


def _fits(patterns: Any, name: str, key: str) -> bool:
    """Whether ``name`` is one of those that ``patterns`` are for, a list or the keys of a dict."""
    given: list[Any] = list(patterns or ()) if isinstance(patterns or (), (list, tuple, Mapping)) else [None]
    if not all(isinstance(pattern, str) for pattern in given):
        raise CheckpointError(f"{key} of {INFO} is {_shown(patterns)}; it takes a list of names")
    return any(_matches(pattern, name) for pattern in given)


def _matches(pattern: str, name: str) -> bool:
    """Only what DeepSpeed and Megatron write: names, with few repetitions, so that no pattern takes long."""
    if not _PLAIN.fullmatch(pattern) or sum(pattern.count(mark) for mark in "*+") > 3:
        raise CheckpointError(f"{INFO} has the pattern {pattern[:80]!r}, which is no name with a few wildcards")
    if len(name) > _MOST_NAME:
        raise CheckpointError(f"a parameter of {len(name)} characters, {name[:80]!r}…; {INFO} is read of shorter names")
    return re.match(pattern, name) is not None
