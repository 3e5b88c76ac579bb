"""``deepspeed.checkpoint.reshape_3d_utils`` and ``.reshape_meg_2d``: which ranks' files a rank of another shape reads.

Ranks are numbered with stages of the pipeline outermost, then tensor parallel, then data parallel outside of both:
rank = data · (stages · tensors) + stage · tensors + tensor. Reading a checkpoint needs none of this in zoo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.checkpointing.foreign import load_torch
from zoo.deepspeed.surface.constants import CONSTANTS

_KEYS = CONSTANTS["checkpoint.constants"]
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-?model_states\.pt|layer_(\d+)-model_(\d+)_model_states\.pt")
_ZERO = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class meg_2d_parallel_map:
    """Lists of something by (stage, tensor rank).

    Attributes:
        map: "stage,tensor" → the list.
    """

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree, self.tp_degree = pp_degree, tp_degree
        self.map: dict[str, list[Any]] = {}

    def simple_init(self) -> None:
        """Give each place the number of its rank."""
        self.map = {f"{i},{j}": [i * self.tp_degree + j] for i, j in self._places(None, None)}

    def add_data(self, pp_index: int, tp_index: int, data: list[Any]) -> None:
        """Append to the list of a place.

        Raises:
            AssertionError: there is no such place, or it is no list.
        """
        self._check(pp_index, tp_index)
        if not isinstance(data, list):
            raise AssertionError(f"add_data() takes a list, and got a {type(data).__name__}.")
        self.map.setdefault(f"{pp_index},{tp_index}", []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """What all places have of this stage and tensor rank; None: of every one.

        Raises:
            AssertionError: there is no such place.
        """
        self._check(pp_index or 0, tp_index or 0)
        return [item for i, j in self._places(pp_index, tp_index) for item in self.map.get(f"{i},{j}", [])]

    def print_data(self, tag: str) -> None:
        """Print all lists."""
        print(f"{tag}:")  # noqa: T201 - that is what it is for
        for key, value in self.map.items():
            print(f"{key} = {value}")  # noqa: T201

    def _places(self, pp_index: int | None, tp_index: int | None) -> Iterator[tuple[int, int]]:
        for i in range(self.pp_degree) if pp_index is None else [pp_index]:
            for j in range(self.tp_degree) if tp_index is None else [tp_index]:
                yield i, j

    def _check(self, pp_index: int, tp_index: int) -> None:
        if not (0 <= pp_index < self.pp_degree and 0 <= tp_index < self.tp_degree):
            raise AssertionError(
                f"({pp_index}, {tp_index}) is no place of {self.pp_degree} stages and {self.tp_degree} tensor ranks."
            )


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int, verbose: bool = False
) -> meg_2d_parallel_map:
    """For each place of the new shape the ranks of the old one whose parts it has, in their order.

    Raises:
        AssertionError: the new shape has more stages or tensor ranks than the old one.
    """
    if new_pp_degree > old_pp_degree or new_tp_degree > old_tp_degree:
        raise AssertionError(
            f"{old_pp_degree} stages and {old_tp_degree} tensor ranks cannot become {new_pp_degree} and "
            f"{new_tp_degree}: shapes only get smaller."
        )
    old = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old.simple_init()
    narrow = meg_2d_parallel_map(old_pp_degree, new_tp_degree)
    for i in range(old_pp_degree):
        for j, part in enumerate(_parts(old.get_data(pp_index=i), new_tp_degree)):
            narrow.add_data(i, j, part)
    new = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    for j in range(new_tp_degree):
        for i, part in enumerate(_parts(narrow.get_data(tp_index=j), new_pp_degree)):
            new.add_data(i, j, part)
    if verbose:
        for tag, one in (("before", old), ("tensor ranks merged", narrow), ("stages merged", new)):
            one.print_data(tag)
    return new


def _parts(items: list[Any], count: int) -> list[list[Any]]:
    if len(items) % count:
        raise AssertionError(f"{len(items)} parts cannot be shared out among {count} ranks evenly.")
    size = len(items) // count
    return [items[k * size : (k + 1) * size] for k in range(count)]


class model_3d_desc:
    """A shape of ranks: stages, tensor ranks, data-parallel ranks."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree, self.tp_degree, self.dp_degree = pp_degree, tp_degree, dp_degree

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[meg_2d_parallel_map]:
        """For each data-parallel rank of the target, the ranks of this shape whose parts each of its places has.

        Raises:
            AssertionError: see :meth:`can_reshape`.
        """
        possible, why = self.can_reshape(target_3d_desc)
        if not possible:
            raise AssertionError(" ".join(why))
        flat = reshape_meg_2d_parallel(
            self.pp_degree, self.tp_degree, target_3d_desc.pp_degree, target_3d_desc.tp_degree, verbose
        )
        ranks, count = self.pp_degree * self.tp_degree, target_3d_desc.dp_degree
        found = [meg_2d_parallel_map(flat.pp_degree, flat.tp_degree) for _ in range(count)]
        for i, j in flat._places(None, None):
            every = [rank + data * ranks for rank in flat.get_data(i, j) for data in range(self.dp_degree)]
            for one, part in zip(found, _parts(every, count), strict=True):
                one.add_data(i, j, part)
        return found

    def get_desc(self) -> str:
        """The shape as a text."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """How many ranks it has."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Whether there is such a rank, and what is wrong with it."""
        asked = (
            ("PP", pp_index, self.pp_degree), ("TP", tp_index, self.tp_degree), ("DP", dp_index, self.dp_degree),
        )  # fmt: skip
        why = [f"{name} indexing error: index {i} >= degree {degree}" for name, i, degree in asked if i >= degree]
        return not why, why

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Whether no degree gets larger, and which does."""
        pairs = (
            ("PP", self.pp_degree, target_3d_desc.pp_degree), ("TP", self.tp_degree, target_3d_desc.tp_degree),
            ("DP", self.dp_degree, target_3d_desc.dp_degree),
        )  # fmt: skip
        why = [f"Expansion reshape not supported - {name}: {old} ---> {new}" for name, old, new in pairs if new > old]
        return not why, why


def get_model_3d_descriptor(dir: str | os.PathLike[str]) -> model_3d_desc:
    """The shape of the ranks that wrote a checkpoint of DeepSpeed: as its files say, or as many as there are of them.

    Raises:
        RuntimeError: no files of a model, files that disagree about the shape, or fewer or more than it has.
    """
    names = sorted(path.name for path in Path(dir).iterdir())
    models = [name for name in names if _MODEL.fullmatch(name)]
    if not models:
        raise RuntimeError(f"{dir} has no mp_rank_*_model_states.pt: it is no folder of a checkpoint of DeepSpeed.")
    told = _told_shape(Path(dir), models)
    if told is not None:
        stages, tensors = told
    else:
        first = next((match for match in map(_LAYER.fullmatch, names) if match), None)
        tensors = len(models)
        if first is not None:
            same = first.group(1) or first.group(3)
            tensors = sum((m.group(1) or m.group(3)) == same for m in map(_LAYER.fullmatch, names) if m)
        stages = max(1, len(models) // tensors)
    zeros = sum(_ZERO.fullmatch(name) is not None for name in names)
    return model_3d_desc(stages, tensors, max(1, zeros // (stages * tensors)))


def _told_shape(folder: Path, models: Sequence[str]) -> tuple[int, int] | None:
    """(stages, tensor ranks) as every file says, None where none does."""
    key = _KEYS["CHECKPOINT_PARALLEL_DIMS"]
    states = [load_torch(folder / name).value for name in models]
    told = [state.get(key) if isinstance(state, Mapping) else None for state in states]
    if all(one is None for one in told):
        return None
    silent = [name for name, one in zip(models, told, strict=True) if one is None]
    if silent:
        raise RuntimeError(f"{key} is missing from model-state files of {folder}: {', '.join(silent)}.")
    degrees = ("CHECKPOINT_PP_DEGREE", "CHECKPOINT_TP_DEGREE")
    shapes: list[tuple[Any, Any]] = []
    for name, one in zip(models, told, strict=True):
        stages, tensors = (one.get(_KEYS[degree]) if isinstance(one, Mapping) else None for degree in degrees)
        shape = stages, tensors
        if not all(isinstance(value, int) and value > 0 for value in shape):
            raise RuntimeError(f"{folder / name}: {key} is {one!r}; it has two degrees above 0.")
        shapes.append(shape)
    if len(set(shapes)) > 1:
        raise RuntimeError(f"{key} disagrees across model-state files of {folder}: {sorted(set(shapes))}.")
    stages, tensors = shapes[0]
    if stages * tensors != len(models):
        raise RuntimeError(f"{folder} has {len(models)} files of a model; {stages} stages x {tensors} ranks wrote it.")
    return stages, tensors
