"""Saving: each rank its file, then one manifest, then one rename, then one pointer.

The order is what makes a crash harmless. Files and manifest are written under a name that nobody reads and forced to
the disk; the rename makes the checkpoint exist; replacing ``latest`` makes it the one to continue from. Until the last
of these the previous checkpoint is untouched.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zoo.checkpointing.coverage import Piece, check, group
from zoo.checkpointing.disk import make_directories, sync, write_text
from zoo.checkpointing.errors import CheckpointError, together
from zoo.checkpointing.exact import dumps
from zoo.checkpointing.names import (
    LATEST,
    MANIFEST,
    StateSlice,
    check_tag,
    file_of,
    key_of,
    replaced_of,
    temporary_of,
)
from zoo.checkpointing.tensors import Entry, write_tensors
from zoo.comm import Communicator

FORMAT = "zoo-checkpoint"
VERSION = 2
READABLE = (1, 2)
"""Versions of the manifest that are read. 2: ``meta`` as zoo.checkpointing.exact writes it."""
RANK_ROLE = "rank"
"""Role of tensors that belong to one rank and no logical tensor (random number generators)."""


def save(
    directory: str | os.PathLike[str],
    tag: str,
    slices: Iterable[StateSlice],
    scalars: Mapping[str, float | int] | None = None,
    meta: Mapping[str, Any] | None = None,
    comm: Communicator | None = None,
    *,
    rank_state: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write the checkpoint ``<directory>/<tag>`` and make it the latest. A collective; all ranks see one file system.

    Args:
        directory: made if it does not exist.
        tag: name of the checkpoint; one of the same name is replaced, and stays loadable until the new one is whole.
        slices: this rank's part; over all ranks every element of every tensor appears exactly once in each of its
        roles.
        scalars: numbers by name, from any rank; ranks that give the same name must give the same value.
        meta: a dict of plain values, of which rank 0's is kept; it comes back exactly, types included
            (zoo.checkpointing.exact says which values that holds).
        comm: the ranks that save together; a world of one if not given.
        rank_state: tensors of this rank alone, read back by a rank of the same number.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: on all ranks, naming the rank and what went wrong there.
    """
    comm = comm if comm is not None else Communicator()
    root = Path(directory)
    what = f"saving the checkpoint {tag!r} in {str(root)!r}"
    working = temporary_of(root, tag)
    together(comm, what, lambda: _prepare(root, check_tag(tag), comm.rank == 0))
    try:
        found = together(
            comm, what, lambda: _write_rank(working, comm.rank, list(slices), scalars or {}, rank_state or {})
        )
        together(comm, what, lambda: _commit(root, tag, found, meta or {}) if comm.rank == 0 else None)
    except CheckpointError:
        if comm.rank == 0:
            shutil.rmtree(working, ignore_errors=True)
        raise
    return root / tag


def _prepare(root: Path, tag: str, first: bool) -> None:
    # Rank 0 makes an empty working directory, and finishes what a crash between two renames may have left.
    if not first:
        return
    make_directories(root)
    old, final = replaced_of(root, tag), root / tag
    if old.is_dir() and not final.is_dir():
        os.rename(old, final)
    shutil.rmtree(old, ignore_errors=True)
    working = temporary_of(root, tag)
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir()


class _Written:
    """What one rank tells the others about its file; plain data, so that it can be exchanged."""

    def __init__(self, size: int, sha256: str, pieces: list[Piece], shapes: dict[str, tuple[int, ...]]) -> None:
        self.size, self.sha256, self.pieces, self.shapes = size, sha256, pieces, shapes
        self.scalars: dict[str, float | int] = {}


def _write_rank(
    working: Path,
    rank: int,
    slices: list[StateSlice],
    scalars: Mapping[str, float | int],
    rank_state: Mapping[str, torch.Tensor],
) -> _Written:
    if not working.is_dir():
        raise CheckpointError(f"{str(working)!r} is not there: all ranks must see the directory that rank 0 made")
    entries: dict[str, Entry] = {}
    pieces: list[Piece] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for item in slices:
        _check_slice(item, shapes)
        if item.length:
            key = key_of(item.role, item.name, item.start)
            if key in entries:
                raise CheckpointError(f"{item.role} {item.name!r} has two slices that start at element {item.start}")
            entries[key] = Entry(key, dtype_of(item), item.length, partial(getattr, item, "tensor"))
        dtype = str(dtype_of(item)).removeprefix("torch.")
        pieces.append(Piece(item.role, item.name, item.start, item.length, rank, dtype))
    for name, tensor in rank_state.items():
        key, flat = key_of(RANK_ROLE, name, 0), tensor.detach().reshape(-1)
        entries[key] = Entry(key, flat.dtype, flat.numel(), partial(torch.Tensor.contiguous, flat))
    metadata = {"format": FORMAT, "version": str(VERSION), "rank": str(rank)}
    size, sha256 = write_tensors(working / file_of(rank), entries.values(), metadata)
    written = _Written(size, sha256, pieces, shapes)
    written.scalars = dict(scalars)
    return written


def dtype_of(item: StateSlice) -> torch.dtype:
    """Of a slice's elements; one that knows it need not load its tensor for that."""
    known: torch.dtype = getattr(item, "dtype", None) or item.tensor.dtype
    return known


def _check_slice(item: StateSlice, shapes: dict[str, tuple[int, ...]]) -> None:
    shape = tuple(int(d) for d in item.shape)
    if "|" in item.role or not item.role or item.role == RANK_ROLE:
        raise CheckpointError(
            f"{item.name!r} has the role {item.role!r}; a role is not empty, not {RANK_ROLE!r}, without '|'"
        )
    if shapes.setdefault(item.name, shape) != shape:
        raise CheckpointError(f"{item.name!r} is given with two shapes, {shapes[item.name]} and {shape}")


def _commit(root: Path, tag: str, found: list[_Written], meta: Mapping[str, Any]) -> None:
    manifest = _manifest(found, meta)
    working, final, old = temporary_of(root, tag), root / tag, replaced_of(root, tag)
    write_text(working / MANIFEST, manifest)  # which forces the entries of all files in there, too
    if final.is_dir():
        os.rename(final, old)
    os.rename(working, final)
    sync(root)
    write_text(root / LATEST, tag + "\n")
    shutil.rmtree(old, ignore_errors=True)


def _manifest(found: list[_Written], meta: Mapping[str, Any]) -> str:
    shapes: dict[str, tuple[int, ...]] = {}
    scalars: dict[str, float | int] = {}
    for rank, written in enumerate(found):
        for name, shape in written.shapes.items():
            if shapes.setdefault(name, shape) != shape:
                raise CheckpointError(
                    f"{name!r} has shape {shape} on rank {rank} and {shapes[name]} on a rank before it"
                )
        for key, value in written.scalars.items():
            if type(value) not in (int, float):
                raise CheckpointError(
                    f"the number {key!r} is {value!r} on rank {rank}, of {type(value)}; an int or a float is needed"
                )
            if repr(scalars.setdefault(key, value)) != repr(value):  # not !=: a NaN differs from itself
                raise CheckpointError(
                    f"the number {key!r} is {value} on rank {rank} and {scalars[key]} on a rank before it"
                )
    pieces = group(piece for written in found for piece in written.pieces)
    check(pieces, shapes)
    roles: dict[str, dict[str, str]] = {name: {} for name in shapes}
    for (role, name), parts in pieces.items():
        roles[name][role] = parts[0].dtype
    document = {
        "format": FORMAT,
        "version": VERSION,
        "world_size": len(found),
        "scalars": scalars,
        "tensors": [{"name": name, "shape": list(shape), "roles": roles[name]} for name, shape in shapes.items()],
        "files": [{"name": file_of(r), "size": w.size, "sha256": w.sha256} for r, w in enumerate(found)],
    }
    # Each part under its own name: an error says where the value is that cannot be written.
    content = {**document, "meta": dict(meta)}
    return "{\n" + ",\n".join(f'"{name}": {dumps(part, name, indent=1)}' for name, part in content.items()) + "\n}\n"
