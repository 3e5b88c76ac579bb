"""A checkpoint of another system as one of zoo: what it says of the training, and all of it written anew."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint
from zoo.checkpointing.format.disk import place_of
from zoo.checkpointing.format.exact import dtype_named
from zoo.checkpointing.resharding import PIECE_BYTES, slice_to_read
from zoo.checkpointing.writing import save
from zoo.comm import Communicator
from zoo.layout import StateSlice

_MOST_ITEMS = 1000
_COUNTERS = ("global_steps", "skipped_steps", "global_samples")


def training_meta(found: ForeignCheckpoint) -> dict[str, Any]:
    """What an engine asks ``meta`` for, of a checkpoint of another system.

    ``model``: names of frozen parameters and of tied ones. ``client``: the client state. ``engine``, where DeepSpeed
    wrote it: counters, the schedule's state and the options of groups, with ``"imported": True``; position in the data,
    parts and random numbers are not there. ``imported``: what else it says.

    Raises:
        CheckpointError: counters that are none.
    """
    said = found.meta.get("deepspeed")
    trained = {name for name, roles in found.roles.items() if set(roles) - {"parameter", "buffer"}}
    parameters = {name for name, roles in found.roles.items() if "parameter" in roles}
    meta: dict[str, Any] = {
        "client": dict(found.meta.get("client", {})),
        "model": {
            "frozen": sorted(parameters - trained) if trained else [],
            "tied": dict(found.meta.get("tied", {})),
        },
        "imported": _described({k: v for k, v in found.meta.items() if k not in ("client", "tied")}),
    }
    if isinstance(said, dict):
        steps, skipped, samples = (_counter(said, key, found) for key in _COUNTERS)
        schedule, groups = said.get("lr_scheduler"), said.get("param_groups")
        meta["engine"] = {
            "imported": True, "global_steps": steps, "skipped_steps": skipped, "samples": samples, "tokens": 0,
            "micro_steps": 0, "accumulation": None, "loader": None, "parts": {}, "registered": {},
            "lr_scheduler": schedule if isinstance(schedule, dict) else None,
            "param_groups": [dict(g) for g in groups if isinstance(g, dict)] if isinstance(groups, list) else [],
        }  # fmt: skip
    return meta


def _described(value: Any) -> Any:
    """Without what no description is: long lists, such as the vocabulary in a GGUF file, are their lengths here."""
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and len(value) > _MOST_ITEMS:
        return f"{len(value)} values, left out"
    return value


def _counter(said: Mapping[str, Any], key: str, found: ForeignCheckpoint) -> int:
    value = said.get(key, 0)
    if type(value) is not int or not 0 <= value < 2**53:
        raise CheckpointError(f"checkpoint {found.tag!r} says {key} is {str(value)[:40]!r}; it is a number from 0 on")
    return value


def num_bytes(found: ForeignCheckpoint) -> int:
    """Of all tensors in all roles, as they are read."""
    return sum(
        math.prod(found.shapes[name]) * dtype_named(dtype).itemsize
        for name, roles in found.roles.items() for dtype in roles.values()
    )  # fmt: skip


def import_checkpoint(
    found: ForeignCheckpoint, directory: str | os.PathLike[str], tag: str | None = None, *, latest: bool = True,
    told: Callable[[int], None] = lambda num_bytes: None,
) -> Path:  # fmt: skip
    """Write it as a checkpoint of zoo, in pieces of at most 64 MiB: of no tensor more is in memory, unless the file
    itself has it in columns, as one part. On one rank.

    What an engine continues with is there where DeepSpeed wrote it; of other formats there are weights, for
    ``load_module_only=True``, and states of the optimizer where the file has them.

    Args:
        found: what a loader of this package returned.
        directory: made if it does not exist.
        tag: its own if not given, with other characters than a tag may have replaced by "_".
        latest: whether it becomes the one that is loaded where no tag is given.
        told: hears of the bytes that are read.

    Returns:
        The new checkpoint's directory.

    Raises:
        ValueError: the directory has a checkpoint of that tag, or is the one that is read.
        CheckpointError: what is wrong with the checkpoint, or kept the new one from being written.
    """
    disk, root = place_of(directory)
    tag = tag if tag is not None else _tag_of(found.tag)
    if disk.is_directory(root / tag):
        raise ValueError(f"{str(directory)!r} has {tag!r} already; give another tag, or another directory")
    if not found.shapes:
        raise CheckpointError(f"{str(found.path)!r} holds no tensors")
    slices = list(_pieces(found, told))
    return save(root, tag, slices, found.scalars, training_meta(found), Communicator.alone(), latest=latest, disk=disk)


def _tag_of(name: str) -> str:
    """A name that a directory can have."""
    stem = re.sub(r"\.(safetensors|gguf|pt|pth|bin)$", "", name)
    found = re.sub(r"[^A-Za-z0-9_.+=-]", "_", stem).lstrip(".+=-")[:200]
    return found if found and found != "latest" else "imported"


def _pieces(found: ForeignCheckpoint, told: Callable[[int], None]) -> Iterator[StateSlice]:
    for name, shape in found.shapes.items():
        for role, named in found.roles[name].items():
            dtype, numel = dtype_named(named), math.prod(shape)
            step = max(PIECE_BYTES // dtype.itemsize, 1)
            for start in range(0, max(numel, 1), step):
                yield slice_to_read(name, role, start, min(step, numel - start), shape, dtype, found, told)
