"""Saving: each rank its file, then one index, then one manifest, whose appearance is the checkpoint.

The order is what makes a crash harmless. Files carry the name of this attempt, so that no two saves ever write the same
file; they are forced to the device before rank 0 hears of them; the index is forced before the manifest is put in its
place, at once; and only then is anything removed that the manifest before it named. ``latest`` is a hint. No directory
is renamed. Before a rank writes it opens one empty file of rank 0, whose name nobody has asked for before: where it is
not there, the ranks have not one directory. Otherwise no rank looks at a file of another, whose name, or whose absence,
a network file system may remember for a while.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpointing.constants import Constants
from zoo.checkpointing.errors import CheckpointError, alike
from zoo.checkpointing.format.data_files import Written, write_data
from zoo.checkpointing.format.disk import Disk, discard, make_directories, place_of, put, write_file
from zoo.checkpointing.format.exact import MARK, encode
from zoo.checkpointing.format.index import OF_PIECES, Column, FileEntry, Index, State, empty_columns
from zoo.checkpointing.format.manifest import (
    FORMAT,
    MOST_META_BYTES,
    SUM,
    VERSION,
    files_named,
    manifest_of,
    next_number,
    parse,
    sum_of,
    written,
)
from zoo.checkpointing.format.names import (
    LATEST,
    MANIFEST,
    RANK_ROLE,
    StateSlice,
    check_tag,
    constant_file_of,
    file_of,
    index_of,
    key_of,
    new_attempt,
)
from zoo.checkpointing.format.tensors import Entry
from zoo.comm import Communicator, gather_object
from zoo.layout import Box, Stored

_LOOKS, _LOOK_AGAIN_S = 10, 0.1


@dataclass(frozen=True)
class Told:
    """``meta`` as JSON: what it was when this was made."""

    value: Any

    @classmethod
    def of(cls, meta: Mapping[str, Any] | Told) -> Told:
        """
        Raises:
            CheckpointError: names the place of what cannot be held, or the largest places where it is too large.
        """
        if isinstance(meta, Told):
            return meta
        if not isinstance(meta, Mapping):
            raise CheckpointError(f"meta is a {type(meta).__name__}; it is a dict of plain values, {{'name': value}}")
        try:
            value = encode(dict(meta), "meta")
            num_bytes = len(json.dumps(value))
        except RecursionError:
            raise CheckpointError("meta contains itself, or is nested too deeply to be written") from None
        if num_bytes > MOST_META_BYTES:
            raise CheckpointError(_too_large(value, num_bytes))
        return cls(value)


def _too_large(value: Any, num_bytes: int) -> str:
    """The sentence, with the places in ``meta`` that have the most."""
    places: list[tuple[int, str]] = []
    left = [("meta", value)]
    while left:
        path, item = left.pop()
        if isinstance(item, dict) and MARK not in item:
            left += [(f"{path}.{key}", inner) for key, inner in item.items()]
        else:
            places.append((len(json.dumps(item)), path))
    largest = ", ".join(f"{path} ({size:,})" for size, path in sorted(places, reverse=True)[:3])
    return (
        f"meta has {num_bytes:,} bytes as JSON, and a manifest takes {MOST_META_BYTES:,} of it; the most are at "
        f"{largest}. Save large tensors as slices or as rank_state, or in a file of their own"
    )


def save(
    directory: str | os.PathLike[str],
    tag: str,
    slices: Iterable[StateSlice],
    scalars: Mapping[str, float | int] | None = None,
    meta: Mapping[str, Any] | Told | None = None,
    comm: Communicator | None = None,
    *,
    rank_state: Mapping[str, torch.Tensor] | None = None,
    latest: bool = True,
    constants: Constants | None = None,
    disk: Disk | None = None,
) -> Path:
    """Write the checkpoint ``<directory>/<tag>`` and make it the latest. A collective; all ranks see one file system.

    Args:
        directory: made if it does not exist; or the URL of a place in an object store, such as "s3://bucket/runs/a".
        tag: name of the checkpoint; one of the same name is replaced, and stays loadable until the new one is whole.
        slices: this rank's part; over all ranks every element of every tensor appears exactly once in each of its
            roles.
        scalars: numbers by name, from any rank; ranks that give the same name must give the same value.
        meta: a dict of plain values, of which rank 0's is kept; it comes back exactly, types included
            (zoo.checkpointing.format.exact says which values that holds).
        comm: the ranks that save together; a world of one if not given.
        rank_state: tensors of this rank alone, read back by a rank of the same number.
        latest: whether it becomes the one that is loaded where no tag is given.
        constants: of whoever saves again and again: slices that are ``constant`` and have not changed are not written
            again.
        disk: the file system, where ``directory`` does not say it.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: on all ranks, naming the rank and what went wrong there.
    """
    comm = comm if comm is not None else Communicator()
    disk, root = place_of(directory, disk)
    what = f"saving the checkpoint {tag!r} in {str(root)!r}"
    alike(comm, what, lambda: check_tag(tag))
    attempt, common, place = comm.broadcast_object((new_attempt(), tag, str(root)) if comm.rank == 0 else None)
    what = f"saving the checkpoint {common!r} in {place!r}"  # the same words on all ranks
    told = alike(comm, what, lambda: _agreed(tag, common, meta or {} if comm.rank == 0 else {}))
    path = root / tag
    made: list[Path] = []
    # What goes where this fails. Rank 0 alone knows in the end whether the checkpoint exists.
    ranks = range(comm.size) if comm.rank == 0 else [comm.rank]
    files = [path / name(attempt, rank) for rank in ranks for name in (file_of, constant_file_of)]
    try:
        alike(comm, what, lambda: _prepare(disk, path, attempt, made) if comm.rank == 0 else None)

        def write() -> _Part:
            _check_shared(disk, path, attempt, place)
            known = constants if constants is not None else Constants()
            return _write_rank(disk, path, attempt, comm.rank, slices, scalars or {}, rank_state or {}, known)

        part = alike(comm, what, write)
        parts = gather_object(comm, part)
        if parts is None:
            files.clear()
        alike(comm, what, lambda: _commit(disk, path, attempt, parts, told, latest, files) if parts else None)
    except BaseException:
        if files:
            _sweep(disk, path, attempt, comm.rank, files, made)
        raise
    return path


def _agreed(tag: str, common: str, meta: Mapping[str, Any] | Told) -> Told:
    if tag != common:
        raise CheckpointError(f"it has the tag {tag!r} here and {common!r} on rank 0; give one tag on all ranks")
    return Told.of(meta)


def _check_shared(disk: Disk, path: Path, attempt: str, place: str) -> None:
    """Raise CheckpointError unless the directory is the one that rank 0 has prepared."""
    for _ in range(_LOOKS):
        try:
            disk.open(path / index_of(attempt)).close()
            return
        except FileNotFoundError:
            # A network file system may remember for a while that there was nothing; to list makes it ask again.
            for folder in (path.parent.parent, path.parent, path):
                with contextlib.suppress(OSError):
                    disk.names(folder)
            time.sleep(_LOOK_AGAIN_S)
    raise CheckpointError(
        f"what rank 0 has made in {place!r} is not in {str(path.parent)!r} here: give one directory, of a file system "
        "that all ranks share"
    )


def _prepare(disk: Disk, path: Path, attempt: str, made: list[Path]) -> None:
    if not disk.is_directory(path.parent):
        made.append(path.parent)
    make_directories(disk, path.parent)
    if disk.make_directory(path):
        made.append(path)
    disk.sync_directory(path.parent)
    write_file(disk, path / index_of(attempt), b"")  # by which ranks see that they share the directory


def _sweep(disk: Disk, path: Path, attempt: str, rank: int, files: list[Path], made: list[Path]) -> None:
    """What this attempt has written, and the directories that it has made as far as they are empty."""
    for file in files:
        discard(disk, file)
    if rank == 0:
        discard(disk, path / index_of(attempt))
        discard(disk, path / f".{MANIFEST}.{attempt}")
        for directory in reversed(made):
            discard(disk, directory)


@dataclass
class _Part:
    """What one rank has written: plain data, so that it can be sent."""

    states: list[State]
    own_names: list[tuple[str, str]]
    columns: dict[str, Column]
    files: list[tuple[str, int, int]]
    """Name, bytes and checksums of each file."""
    scalars: dict[str, float | int]


def _write_rank(
    disk: Disk, path: Path, attempt: str, rank: int, slices: Iterable[StateSlice],
    scalars: Mapping[str, float | int], rank_state: Mapping[str, torch.Tensor], constants: Constants,
) -> _Part:  # fmt: skip
    entries: dict[str, Entry] = {}
    constant: dict[str, Entry] = {}
    states: dict[tuple[str, str], tuple[int, State]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    rows: list[tuple[int, int, int, str]] = []
    boxes: list[Box | None] = []
    for item in slices:
        shape = _check_slice(item, shapes)
        dtype = item.dtype
        named = State(item.name, item.role, str(dtype).removeprefix("torch."), shape)
        number, known = states.setdefault((item.name, item.role), (len(states), named))
        if known != named:
            raise CheckpointError(f"{item.role} {item.name!r} is given in two dtypes, {known.dtype} and {named.dtype}")
        if item.length:
            key = key_of(item.role, item.name, item.start)
            if key in entries or key in constant:
                raise CheckpointError(f"{item.role} {item.name!r} has two slices that start at element {item.start}")
            kind = constant if item.constant else entries
            kind[key] = Entry(key, dtype, item.length, partial(getattr, item, "tensor"), item.lent)
            rows.append((number, item.start, item.length, key))
            boxes.append(_box_of(item, shape))
    own: list[tuple[int, int, str]] = []
    own_names: list[tuple[str, str]] = []
    for name, tensor in rank_state.items():
        check_tensor(f"rank_state[{name!r}]", tensor)
        key, flat = key_of(RANK_ROLE, name, 0), tensor.detach().reshape(-1)
        entries[key] = Entry(key, flat.dtype, flat.numel(), partial(torch.Tensor.contiguous, flat))
        own.append((len(own_names), flat.numel(), key))
        own_names.append((name, str(flat.dtype).removeprefix("torch.")))
    metadata = {"format": FORMAT, "version": str(VERSION), "rank": str(rank)}
    name = file_of(attempt, rank)
    files = [(name, write_data(disk, path / name, entries.values(), metadata))]
    if constant:
        name = constant_file_of(attempt, rank)
        files.append((name, constants.put(disk, path / name, list(constant.values()), metadata)))
    disk.sync_directory(path)
    columns = _columns(rank, rows, boxes, own, [written for _, written in files])
    told = [(name, written.size, len(written.sums)) for name, written in files]
    return _Part([state for _, state in states.values()], own_names, columns, told, dict(scalars))


def _columns(
    rank: int, rows: list[tuple[int, int, int, str]], boxes: list[Box | None], own: list[tuple[int, int, str]],
    files: Sequence[Written],
) -> dict[str, Column]:  # fmt: skip
    """``file`` is the number of one of this rank's files."""
    found = empty_columns()
    offsets = {key: (number, at) for number, written in enumerate(files) for key, at in written.offsets.items()}
    places: list[int] = []
    extents: list[int] = []
    for box in boxes:
        places.append(len(extents) if box is not None else -1)
        extents += [*box.offsets, *box.sizes] if box is not None else []
    given: dict[str, list[int]] = {
        "state": [row[0] for row in rows], "start": [row[1] for row in rows], "length": [row[2] for row in rows],
        "file": [offsets[row[3]][0] for row in rows], "offset": [offsets[row[3]][1] for row in rows],
        "box": places, "extents": extents,
        "own_rank": [rank] * len(own), "own_name": [row[0] for row in own], "own_length": [row[1] for row in own],
        "own_file": [0] * len(own), "own_offset": [offsets[row[2]][1] for row in own],
    }  # fmt: skip
    columns = {name: np.array(values, dtype=found[name].dtype) for name, values in given.items()}
    return {**columns, "sums": np.concatenate([written.sums for written in files])}


def check_slice(item: Any) -> None:
    """Raises:
    CheckpointError: it is no slice.
    """
    if not isinstance(item, StateSlice):
        raise CheckpointError(
            f"a {type(item).__name__} is given to be saved; the slices of a checkpoint are zoo.layout.StateSlice, such "
            "as those of state_slices()"
        )
    check_tensor(f"the source of {item.role} {item.name!r}", item.source)


def check_tensor(what: str, value: Any) -> None:
    """Raises:
    CheckpointError: it is no tensor, nor what reads one.
    """
    if not isinstance(value, (torch.Tensor, Stored)):
        raise CheckpointError(f"{what} is a {type(value).__name__}; it has to be a tensor")


def _check_slice(item: StateSlice, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    check_slice(item)
    shape = tuple(int(d) for d in item.shape)
    if "|" in item.role or not item.role or item.role == RANK_ROLE:
        raise CheckpointError(
            f"{item.name!r} has the role {item.role!r}; a role is not empty, not {RANK_ROLE!r}, without '|'"
        )
    if shapes.setdefault(item.name, shape) != shape:
        raise CheckpointError(f"{item.name!r} is given with two shapes, {shapes[item.name]} and {shape}")
    return shape


def _box_of(item: StateSlice, shape: tuple[int, ...]) -> Box | None:
    """The box that a slice is, unless that is a run."""
    box = item.box
    if box is None:
        return None
    if not box.fits(shape) or box.numel != item.length or Box.whole(shape).number_of(box.offsets) != item.start:
        raise CheckpointError(
            f"{item.role} {item.name!r}, of shape {shape}, is given as the {box}, with {item.length} elements from "
            f"element {item.start}: the box is outside of the shape, or has other elements"
        )
    return None if box.is_run_in(shape) else box


def _commit(
    disk: Disk, path: Path, attempt: str, parts: list[_Part], told: Told, latest: bool, files: list[Path]
) -> None:
    """``files`` is emptied where the manifest may be there: what it names must not be removed any more."""
    index = merged(parts)
    index.check()
    data = index.encode()
    name = index_of(attempt)
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "attempt": attempt,
        "number": next_number(disk, path.parent),
        "world_size": len(parts),
        "index": {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "scalars": encode(_scalars(parts), "scalars"),
        "meta": told.value,
    }
    document[SUM] = sum_of(document)
    text = written(document)
    manifest_of(parse(text, MANIFEST), MANIFEST)  # what no load would take is not committed
    disk.remove(path / name)  # the empty one
    write_file(disk, path / name, data)
    disk.sync_directory(path)
    temporary = path / f".{MANIFEST}.{attempt}"
    write_file(disk, temporary, text)
    before = files_named(disk, path)  # at the latest: another saver may replace it as well
    files.clear()
    disk.rename(temporary, path / MANIFEST)
    disk.sync_directory(path)
    if latest:
        put(disk, path.parent / LATEST, path.name.encode())
    for old in before:
        discard(disk, path / old)


def merged(parts: list[_Part]) -> Index:
    """The parts of all ranks as one index."""
    states: dict[tuple[str, str], int] = {}
    known: list[State] = []
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    own_names: dict[tuple[str, str], int] = {}
    files: list[FileEntry] = []
    lists: dict[str, list[Column]] = {name: [] for name in empty_columns()}
    num_sums = num_extents = 0
    for rank, part in enumerate(parts):
        numbers = []
        for state in part.states:
            shape, first = shapes.setdefault(state.name, (state.shape, rank))
            if shape != state.shape:
                raise CheckpointError(
                    f"{state.name!r} has shape {state.shape} on rank {rank} and {shape} on rank {first}"
                )
            number = states.setdefault((state.name, state.role), len(states))
            if number == len(known):
                known.append(state)
            elif known[number].dtype != state.dtype:
                dtypes = sorted({known[number].dtype, state.dtype})
                raise CheckpointError(f"{state.role} {state.name!r} is stored in several dtypes: {', '.join(dtypes)}")
            numbers.append(number)
        own = [own_names.setdefault(name, len(own_names)) for name in part.own_names]
        columns = dict(part.columns)
        columns["state"] = np.array(numbers, dtype="<i4")[columns["state"]]
        columns["own_name"] = np.array(own, dtype="<i4")[columns["own_name"]]
        for name in ("file", "own_file"):
            columns[name] = columns[name] + np.array(len(files), dtype="<i4")
        columns["box"] = np.where(columns["box"] >= 0, columns["box"] + num_extents, -1).astype("<i4")
        for name, column in columns.items():
            lists[name].append(column)
        for name, size, sums in part.files:
            files.append(FileEntry(name, size, num_sums))
            num_sums += sums
        num_extents += len(part.columns["extents"])
    columns = {name: np.concatenate(found) for name, found in lists.items()}
    order = np.lexsort((columns["file"], columns["start"], columns["state"]))
    for name in OF_PIECES:
        columns[name] = columns[name][order]
    return Index(known, list(own_names), files, columns)


def _scalars(parts: list[_Part]) -> dict[str, float | int]:
    scalars: dict[str, float | int] = {}
    for rank, part in enumerate(parts):
        for key, value in part.scalars.items():
            if not isinstance(key, str):
                raise CheckpointError(f"scalars has the key {key!r} on rank {rank}; its keys are names")
            if type(value) not in (int, float):
                raise CheckpointError(
                    f"the number {key!r} is {value!r} on rank {rank}, of {type(value)}; an int or a float is needed"
                )
            if repr(scalars.setdefault(key, value)) != repr(value):  # not !=: a NaN differs from itself
                raise CheckpointError(
                    f"the number {key!r} is {value} on rank {rank} and {scalars[key]} on a rank before it"
                )
    return scalars
