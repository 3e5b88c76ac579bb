"""Loading: rank 0 reads the manifest and the index, and all ranks check them; then each reads only what it asks for."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpointing import under_way
from zoo.checkpointing.errors import (
    CheckpointError,
    DamageError,
    MissingStateError,
    UnreadableError,
    alike,
    anywhere,
    no_access,
)
from zoo.checkpointing.format import version2
from zoo.checkpointing.format.data_files import Cache, DataFile
from zoo.checkpointing.format.disk import Disk, place_of, read_file
from zoo.checkpointing.format.exact import dtype_named
from zoo.checkpointing.format.index import Index
from zoo.checkpointing.format.manifest import (
    INDEXED,
    Manifest,
    attempt_of,
    manifest_of,
    meta_of,
    numbered,
    parse,
    scalars_of,
    text_of,
    world_size_of,
)
from zoo.checkpointing.format.names import LATEST, MANIFEST, check_tag, find, latest_tag
from zoo.comm import Communicator
from zoo.layout import Box

_log = logging.getLogger("zoo.checkpointing")
_MOST_OPEN = 32
"""Files of one checkpoint that are open at once."""
_MOST_REPLACED = 5
"""How often a checkpoint that is saved anew while it is opened is opened again."""
_attempts: dict[Path, str | None] = {}
"""Which save it was that rank 0 has opened last, by the checkpoint's directory: what was found to be damaged is not
what has been saved there since."""


@dataclass(frozen=True)
class _Opened:
    """What rank 0 has read, as bytes."""

    asked: str | None
    tag: str
    path: Path
    attempt: str | None
    manifest: bytes
    index: bytes
    sha256: tuple[str, ...] = ()
    """Of each file; of version 2 only."""


def load(
    directory: str | os.PathLike[str], tag: str | None = None, comm: Communicator | None = None, *, verify: bool = True,
    skip: Sequence[str] = (), disk: Disk | None = None,
) -> Checkpoint:  # fmt: skip
    """Open the checkpoint ``tag`` of a directory (the latest by default) on all ranks, at any world size. A collective.

    Before anything is read from it: the manifest and the index are parsed, every element of every tensor is in the
    files exactly once, and the files are there with their sizes. What is read is compared with its checksums on the way
    (``verify``); files of version 2, which have one for each file, are read through before. Nothing is unpickled.

    Without a tag ``latest`` is only a hint: where the checkpoint that it names is damaged or gone, the newest one that
    is whole is opened, and the log says so. What may not or cannot be read just now is never passed over. A checkpoint
    that another job saves anew meanwhile is opened again.

    Args:
        tag: the same on all ranks.
        skip: tags that are not loaded where none is given: what was found to be damaged while it was read. One that was
            saved anew since then is not skipped.

    Raises:
        CheckpointError: on all ranks alike, naming what is wrong.
    """
    comm = comm if comm is not None else Communicator()
    disk, root = place_of(directory, disk)
    what = comm.broadcast_object(f"loading the checkpoint {tag or 'latest'!r} of {str(directory)!r}")
    tried, num_replaced = [name for name in skip if comm.rank != 0 or not _is_new(disk, root / name)], 0
    under_way.finish(root)
    while True:
        opened: _Opened | None = comm.broadcast_object(
            alike(comm, what, lambda: _open(disk, root, tag, tried) if comm.rank == 0 else None)
        )
        if opened is None:
            raise AssertionError("rank 0 has opened nothing, and raised nothing.")
        last: list[Exception] = []
        try:
            return alike(comm, what, _telling(last, disk, opened, comm, tag, verify))
        except CheckpointError as error:
            if anywhere(comm, bool(last)):
                raise
            new = comm.rank == 0 and num_replaced < _MOST_REPLACED and _is_new(disk, opened.path)
            num_replaced += new
            if not new:
                tried.append(opened.tag)
            found = alike(comm, what, lambda: comm.rank == 0 and (new or _others(disk, root, tag, tried)))  # noqa: B023
            if not comm.broadcast_object(found):
                raise
            if comm.rank == 0:
                what_now = f"the checkpoint {opened.tag!r} was saved anew, and is opened again"
                _log.warning("%s: %s", what_now if new else "the latest checkpoint is passed over", error)


def _telling(
    last: list[Exception], disk: Disk, opened: _Opened, comm: Communicator, tag: str | None, verify: bool
) -> Callable[[], Checkpoint]:
    """:func:`_checked`; ``last`` gets what no other checkpoint would make better."""

    def work() -> Checkpoint:
        try:
            if tag != opened.asked:
                raise UnreadableError(
                    f"the tag {tag!r} is asked for here and {opened.asked!r} on rank 0; give one tag on all ranks"
                )
            return _checked(disk, opened, comm, verify)
        except UnreadableError as error:
            last.append(error)
            raise

    return work


def _is_new(disk: Disk, path: Path) -> bool:
    """Whether a checkpoint was saved anew since this process has opened it."""
    attempt = attempt_of(disk, path) if path in _attempts else None
    return attempt is not None and attempt != _attempts[path]


def _others(disk: Disk, root: Path, tag: str | None, tried: Sequence[str]) -> bool:
    return tag is None and next(_candidates(disk, root, tried), None) is not None


def _candidates(disk: Disk, root: Path, tried: Sequence[str]) -> Iterator[str]:
    """Tags that may be loaded where none is given, the best first. All manifests are looked at only after the first."""
    named = None
    try:
        named = latest_tag(root, disk=disk)
    except CheckpointError as error:
        _log.warning("%s: the newest checkpoint is taken instead.", error)
    if named is not None and named not in tried:
        yield named
    unreadable: list[str] = []
    newest = [name for _, name in reversed(numbered(disk, root, unreadable))] if disk.is_directory(root) else []
    if unreadable:
        raise UnreadableError(f"{unreadable[0]}; so which checkpoint is the newest is not known: give a tag")
    yield from (name for name in newest if name not in tried and name != named)


def _open(disk: Disk, root: Path, tag: str | None, tried: Sequence[str]) -> _Opened:
    if tag is not None:
        return _read(disk, root, check_tag(tag), tag)
    first = None
    for name in _candidates(disk, root, tried):
        try:
            return _read(disk, root, name, None)
        except UnreadableError:
            raise
        except CheckpointError as error:
            if first is None:
                first = error
            _log.warning("the checkpoint %r is passed over: %s", name, error)
    if first is not None:
        raise first
    raise CheckpointError(f"{str(root)!r} has no file {LATEST!r} and no checkpoints: nothing was saved there")


def _read(disk: Disk, root: Path, tag: str, asked: str | None) -> _Opened:
    """The manifest and the index of a checkpoint, checked."""
    path = find(disk, root, tag)
    for again in (True, True, False):
        text = text_of(disk, path)
        document = parse(text, str(path / MANIFEST))
        if document["version"] < INDEXED:
            index, sums = version2.index_of(disk, path, document)
            return _Opened(asked, tag, path, None, text, index.encode(), tuple(sums))
        manifest = manifest_of(document, str(path / MANIFEST))
        try:
            found = _Opened(asked, tag, path, manifest.attempt, text, _index(disk, path, manifest))
        except CheckpointError:
            # Another job may have replaced it since its manifest was read.
            if not again or attempt_of(disk, path) in (None, manifest.attempt):
                raise
        else:
            _attempts[path] = manifest.attempt
            return found
    raise AssertionError("unreachable")


def _index(disk: Disk, path: Path, manifest: Manifest) -> bytes:
    try:
        data = read_file(disk, path / manifest.index, manifest.index_size)
    except OSError as error:
        kind = UnreadableError if no_access(error) else CheckpointError
        raise kind(f"the index {manifest.index} of {str(path)!r} cannot be read: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"the index of {str(path)!r}: {error}") from None
    if hashlib.sha256(data).hexdigest() != manifest.index_sha256:
        raise CheckpointError(
            f"the index {manifest.index} has another SHA-256 than the manifest says: it was changed or damaged after "
            "it was written"
        )
    return data


def _checked(disk: Disk, opened: _Opened, comm: Communicator, verify: bool) -> Checkpoint:
    document = parse(opened.manifest, str(opened.path / MANIFEST))
    found = Checkpoint(disk, opened.tag, opened.path, document, Index.decode(opened.index), verify=verify)
    for file in range(comm.rank, len(found.index.files), comm.size):
        entry = found.index.files[file]
        DataFile(disk, opened.path / entry.name, entry.size, None).close()
        if verify and opened.sha256:
            version2.check_sum(disk, opened.path, entry, opened.sha256[file])
    return found


class Checkpoint:
    """An open, checked checkpoint. Several threads may read it, one at a time: each call waits for the one before it.

    A few of its files are open at once; one that is not is found by its name, so a checkpoint that is saved anew while
    it is read is told to be that, and must be loaded again.

    Attributes:
        tag, path, disk: its name, its directory, and where that is.
        world_size: of the job that wrote it.
        meta, scalars: as given to ``save``.
        shapes: name → shape of every logical tensor.
        roles: name → role → dtype.
        index: what is where.
    """

    def __init__(
        self, disk: Disk, tag: str, path: Path, document: dict[str, Any], index: Index, *, verify: bool = True
    ) -> None:
        # First of all: whatever raises below, close() finds these.
        self._lock, self._cache, self._files = threading.RLock(), Cache(), OrderedDict[int, DataFile]()
        self.tag, self.path, self.index = tag, path, index
        self.disk, self._verify = disk, verify
        self.version: int = document["version"]
        self.world_size = world_size_of(document)
        if self.version < INDEXED:
            self.meta, self.scalars = meta_of(document), scalars_of(document["scalars"])
            self._attempt, self._sha256 = None, [str(entry["sha256"]) for entry in document["files"]]
        else:
            manifest = manifest_of(document, MANIFEST)
            self.meta, self.scalars = manifest.meta, manifest.scalars
            self._attempt, self._sha256 = manifest.attempt, []
        self.shapes: Mapping[str, tuple[int, ...]] = {state.name: state.shape for state in index.states}
        roles: dict[str, dict[str, str]] = {name: {} for name in self.shapes}
        for state in index.states:
            roles[state.name][state.role] = state.dtype
        self.roles: Mapping[str, Mapping[str, str]] = roles

    _attempt: str | None
    _sha256: list[str]
    """Of each file; of version 2 only."""

    def read(
        self, name: str, role: str, start: int | Box, length: int, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:  # fmt: skip
        """Elements [start, start + length) of a tensor in one role: (length,), in the dtype they were saved in.

        In the place of ``start`` may be a box of ``length`` elements, which come in its row-major order.

        Args:
            out: memory for them. It is filled and returned where it is (length,) on the CPU, contiguous and of the
                saved dtype; other memory is left alone. After an error it may hold a part of them.

        Raises:
            MissingStateError: no such tensor or role (also a KeyError).
            CheckpointError: a range outside of it, or bytes that are not those that were written.
        """
        if isinstance(start, Box):
            fits = out is not None and out.shape == (start.numel,) and out.is_contiguous()
            shaped = out.view(start.sizes) if out is not None and fits else None
            found = self.read_box(name, role, start, out=shaped)
            return out if out is not None and found is shaped else found.view(-1)
        with self._lock:
            return self._read(name, role, start, length, out)

    def _room(self, name: str, role: str, sizes: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
        """``out`` where it may be filled, or new memory."""
        dtype = dtype_named(self.roles[name][role])
        if out is None or out.shape != sizes or out.dtype is not dtype or not out.is_cpu:
            return torch.empty(sizes, dtype=dtype)
        return out if out.is_contiguous() and not out.requires_grad else torch.empty(sizes, dtype=dtype)

    def _read(self, name: str, role: str, start: int, length: int, room: torch.Tensor | None) -> torch.Tensor:
        state = self._state_of(name, role)
        numel = math.prod(self.shapes[name])
        if start < 0 or length < 0 or start + length > numel:
            raise CheckpointError(
                f"[{start}, {start + length}) lies outside of {role} {name!r}, which has {numel} elements in "
                f"checkpoint {self.tag!r}"
            )
        out = self._room(name, role, (length,), room)
        boxed = False
        for row in self.index.meeting(state, start, start + length):
            if self.index.box_of(row) is not None:
                boxed = True
                continue
            low, high = self._common(row, start, start + length)
            if low < high:
                self._load(row, low - int(self.index.columns["start"][row]), out[low - start : high - start])
        if boxed:
            done = 0
            for box in Box.whole(self.shapes[name]).run(start, start + length):
                self._fill(state, box, out[done : done + box.numel].view(box.sizes), boxed=True)
                done += box.numel
        return out

    def read_box(self, name: str, role: str, box: Box, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The elements of a box of a tensor in one role: of the shape ``box.sizes``, in the dtype they were saved in.

        For parameters that are a part of a tensor: rows or columns, an expert. Of each saved piece one run is read for
        each of the at most 2d - 1 boxes that it is, from the first element that is wanted to the last: never row by
        row. ``out`` as in :meth:`read`.

        Raises:
            MissingStateError: no such tensor or role (also a KeyError).
            CheckpointError: a box outside of it, or bytes that are not those that were written.
        """
        state = self._state_of(name, role)
        whole = Box.whole(self.shapes[name])
        if not box.fits(whole.sizes):
            raise CheckpointError(
                f"{box} lies outside of {role} {name!r}, which has shape {whole.sizes} in checkpoint {self.tag!r}"
            )
        found = self._room(name, role, box.sizes, out)
        if not box.numel:
            return found
        with self._lock:
            for boxed in (False, True):
                self._fill(state, box, found, boxed=boxed)
        return found

    def tensor(self, name: str, role: str = "parameter") -> torch.Tensor:
        """A whole tensor in one role, in its shape."""
        shape = self.shapes.get(name, ())
        return self.read(name, role, 0, math.prod(shape)).view(shape)

    def rank_state(self, rank: int) -> dict[str, torch.Tensor]:
        """The tensors that belonged to one rank alone; empty for a rank that the writing job did not have."""
        found = {}
        columns = self.index.columns
        for row in np.flatnonzero(columns["own_rank"] == rank).tolist():
            name, dtype = self.index.own_names[int(columns["own_name"][row])]
            found[name] = torch.empty(int(columns["own_length"][row]), dtype=dtype_named(dtype))
            if found[name].numel():
                with self._lock:
                    self._file(int(columns["own_file"][row])).read(found[name], int(columns["own_offset"][row]))
        return found

    def verify(self) -> Iterator[tuple[str, int]]:
        """Read every byte of every file and compare it with its checksum; yields (file, its bytes) one by one. What was
        opened with ``verify=False`` is compared from here on.

        Raises:
            CheckpointError: names the file and the bytes that are not those that were written.
        """
        with self._lock:
            if not self._verify:
                self._verify = True
                self.close()  # with it goes what was read and not compared
        for number, entry in enumerate(self.index.files):
            with self._lock:
                if self._sha256:
                    version2.check_sum(self.disk, self.path, entry, self._sha256[number])
                else:
                    self._file(number).check()
            yield entry.name, entry.size

    def close(self) -> None:
        """Close its files; it can go on to be read."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()
            self._cache.reading.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _state_of(self, name: str, role: str) -> int:
        number = self.index.number_of(name, role)
        if number is None:
            held = ", ".join(sorted(self.roles[name])) if name in self.roles else "no tensor of that name"
            raise MissingStateError(f"checkpoint {self.tag!r} has no {role} of {name!r}; it has {held}")
        return number

    def _common(self, row: int, start: int, stop: int) -> tuple[int, int]:
        """What of the elements [start, stop) a run has."""
        first = int(self.index.columns["start"][row])
        return max(first, start), min(first + int(self.index.columns["length"][row]), stop)

    def _fill(self, state: int, box: Box, out: torch.Tensor, *, boxed: bool) -> None:
        """What pieces that are boxes, or runs, have of a box."""
        whole = Box.whole(self.index.states[state].shape)
        start, stop = _span(whole, box)
        for row in self.index.meeting(state, start, stop):
            piece = self.index.box_of(row)
            if (piece is not None) is not boxed:
                continue
            if piece is not None:
                order, first = piece, 0
                found = piece.intersection(box)
                parts = [found] if found is not None else []
            else:
                low, high = self._common(row, start, stop)
                order, first = whole, int(self.index.columns["start"][row])
                parts = box.in_runs(whole, [(low, high)]) if low < high else []
            for common in parts:
                low, high = _span(order, common)
                memory = torch.empty(high - low, dtype=out.dtype)
                self._load(row, low - first, memory)
                ranges = zip(common.offsets, common.stops, box.offsets, strict=True)
                out[tuple(slice(low - base, high - base) for low, high, base in ranges)] = memory.as_strided(
                    common.sizes, order.strides
                )

    def _load(self, row: int, skipped: int, out: torch.Tensor) -> None:
        """What a piece has after so many of its elements."""
        columns = self.index.columns
        place = int(columns["offset"][row]) + skipped * out.element_size()
        self._file(int(columns["file"][row])).read(out, place)

    def _file(self, number: int) -> DataFile:
        found = self._files.get(number)
        if found is not None:
            self._files.move_to_end(number)
            return found
        while len(self._files) >= _MOST_OPEN:
            self._files.popitem(last=False)[1].close()
        try:
            found = self._open(number)
        except UnreadableError:  # too many files are open, perhaps: these are closed first
            if not self._files:
                raise
            self.close()
            found = self._open(number)
        self._files[number] = found
        return found

    def _open(self, number: int) -> DataFile:
        entry = self.index.files[number]
        sums = self.index.sums_of(number) if self._verify else None
        try:
            return DataFile(self.disk, self.path / entry.name, entry.size, sums, self._cache)
        except DamageError:
            if attempt_of(self.disk, self.path) in (None, self._attempt):
                raise
            raise DamageError(
                f"the checkpoint {self.tag!r} was saved anew after it was opened, and {entry.name} has gone: load it "
                "again"
            ) from None


def _span(whole: Box, box: Box) -> tuple[int, int]:
    """From the first element of a box to one past its last, in the order of the whole tensor."""
    return whole.number_of(box.offsets), whole.number_of([stop - 1 for stop in box.stops]) + 1
