"""Loading: check first, then read only what is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zoo.checkpointing.coverage import Piece, check, group
from zoo.checkpointing.errors import CheckpointError, MissingStateError, together
from zoo.checkpointing.manifest import Manifest, check_directory, check_sum, read_manifest
from zoo.checkpointing.names import check_tag, find, key_of, latest_tag, parse_key
from zoo.checkpointing.tensors import CODES
from zoo.checkpointing.writing import RANK_ROLE
from zoo.comm import Communicator
from zoo.layout import Box, Intervals

_DTYPES = {code: str(dtype).removeprefix("torch.") for dtype, code in CODES.items()}


def load(
    directory: str | os.PathLike[str], tag: str | None = None, comm: Communicator | None = None, *, verify: bool = True
) -> Checkpoint:
    """Open the checkpoint ``tag`` of a directory (the latest by default) on all ranks, at any world size. A collective.

    Before anything is read from it: the manifest is parsed, all files are there with their sizes and no others, every
    element of every tensor is in them exactly once, and (``verify``) the checksums agree; the ranks share that last
    work. Nothing is unpickled.

    Raises:
        CheckpointError: on all ranks alike, naming what is wrong.
    """
    comm = comm if comm is not None else Communicator()
    what = f"loading the checkpoint {tag or 'latest'!r} of {str(directory)!r}"

    def work() -> Checkpoint:
        root = Path(directory)
        chosen = check_tag(tag) if tag is not None else latest_tag(root)
        if chosen is None:
            raise CheckpointError(f"{str(root)!r} has no file 'latest': nothing was saved there, or give a tag")
        path = find(root, chosen)
        manifest = read_manifest(path)
        check_directory(path, manifest)
        if verify:
            for entry in manifest.files[comm.rank :: comm.size]:
                check_sum(path, entry)
        return Checkpoint(chosen, path, manifest)

    opened: list[Checkpoint] = []
    together(comm, what, lambda: opened.append(work()))
    tags = together(comm, what, lambda: opened[0].tag)
    if len(set(tags)) > 1:
        raise CheckpointError(f"{what} failed: the ranks see different latest checkpoints, {tags}", everywhere=True)
    return opened[0]


class Checkpoint:
    """An open, checked checkpoint.

    Attributes:
        tag, path: its name and directory.
        world_size: of the job that wrote it.
        meta, scalars: as given to ``save``.
        shapes: name → shape of every logical tensor.
        roles: name → role → dtype.
    """

    def __init__(self, tag: str, path: Path, manifest: Manifest) -> None:
        self.tag, self.path = tag, path
        self.world_size, self.meta, self.scalars = manifest.world_size, manifest.meta, manifest.scalars
        self.shapes: Mapping[str, tuple[int, ...]] = manifest.shapes
        self.roles: Mapping[str, Mapping[str, str]] = manifest.roles
        self._files: dict[int, Any] = {}
        self._rank_state: dict[int, list[str]] = {}
        names = [entry.name for entry in manifest.files]
        pieces = [piece for rank, name in enumerate(names) for piece in self._pieces(rank, name)]
        self._pieces_of = group(pieces)
        self._intervals = {
            key: Intervals([(p.start, p.start + p.length) for p in parts]) for key, parts in self._pieces_of.items()
        }
        self._check(manifest)

    def read(self, name: str, role: str, start: int, length: int) -> torch.Tensor:
        """Elements [start, start + length) of a tensor in one role: (length,), in the dtype they were saved in.

        Raises:
            MissingStateError: no such tensor or role (also a KeyError).
            CheckpointError: a range outside of it.
        """
        dtype = self._dtype_of(name, role)
        numel = math.prod(self.shapes[name])
        if start < 0 or length < 0 or start + length > numel:
            raise CheckpointError(
                f"[{start}, {start + length}) lies outside of {role} {name!r}, which has {numel} elements in "
                f"checkpoint "
                f"{self.tag!r}"
            )
        out = torch.empty(length, dtype=dtype)
        for part, low, high in self._meeting(name, role, start, start + length):
            out[low - start : high - start] = self._load(part, low, high)
        return out

    def read_box(self, name: str, role: str, box: Box) -> torch.Tensor:
        """The elements of a box of a tensor in one role: of the shape ``box.sizes``, in the dtype they were saved in.

        For parameters that are a part of a tensor: rows or columns, an expert. Of each saved slice one run is read for
        each of the at most 2d - 1 boxes that it is, from the first element that is wanted to the last: never row by
        row.

        Raises:
            MissingStateError: no such tensor or role (also a KeyError).
            CheckpointError: a box outside of it.
        """
        dtype = self._dtype_of(name, role)
        whole = Box.whole(self.shapes[name])
        if not box.fits(whole.sizes):
            raise CheckpointError(
                f"{box} lies outside of {role} {name!r}, which has shape {whole.sizes} in checkpoint {self.tag!r}"
            )
        out = torch.empty(box.sizes, dtype=dtype)
        if not box.numel:
            return out
        for part, start, stop in self._meeting(name, role, *_span(whole, box)):
            for common in box.in_runs(whole, [(start, stop)]):
                found = self._load(part, *_span(whole, common)).as_strided(common.sizes, whole.strides)
                ranges = zip(common.offsets, common.stops, box.offsets, strict=True)
                out[tuple(slice(low - base, high - base) for low, high, base in ranges)] = found
        return out

    def _dtype_of(self, name: str, role: str) -> torch.dtype:
        if name not in self.roles or role not in self.roles[name]:
            held = ", ".join(sorted(self.roles[name])) if name in self.roles else "no tensor of that name"
            raise MissingStateError(f"checkpoint {self.tag!r} has no {role} of {name!r}; it has {held}")
        dtype: torch.dtype = getattr(torch, self.roles[name][role])
        return dtype

    def _meeting(self, name: str, role: str, start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
        """The slices that have some of the elements [start, stop), each with the range that it has of them."""
        parts = self._pieces_of.get((role, name), [])
        if parts and start < stop:
            for part in (parts[i] for i in self._intervals[role, name].meeting(start, stop)):
                yield part, max(part.start, start), min(part.start + part.length, stop)

    def _load(self, part: Piece, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the tensor, all of which a slice has."""
        view = self._files[part.rank].get_slice(key_of(part.role, part.name, part.start))
        found: torch.Tensor = view[start - part.start : stop - part.start]
        return found

    def tensor(self, name: str, role: str = "parameter") -> torch.Tensor:
        """A whole tensor in one role, in its shape."""
        shape = self.shapes.get(name, ())
        return self.read(name, role, 0, math.prod(shape)).view(shape)

    def rank_state(self, rank: int) -> dict[str, torch.Tensor]:
        """The tensors that belonged to one rank alone; empty for a rank that the writing job did not have."""
        return {n: self._files[rank].get_tensor(key_of(RANK_ROLE, n, 0)) for n in self._rank_state.get(rank, [])}

    def _pieces(self, rank: int, file: str) -> list[Piece]:
        try:
            handle: Any = safe_open(self.path / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"the file {file} is not in the safetensors format: {error}") from None
        self._files[rank] = handle
        found = []
        for key in handle.keys():  # noqa: SIM118  (the handle is no dict)
            role, name, start = parse_key(key)
            if role == RANK_ROLE:
                self._rank_state.setdefault(rank, []).append(name)
                continue
            view = handle.get_slice(key)
            shape = view.get_shape()
            if len(shape) != 1:
                raise CheckpointError(f"{key!r} in {file} has shape {shape}; slices are flat")
            dtype = _DTYPES.get(str(view.get_dtype()), str(view.get_dtype()))
            found.append(Piece(role, name, start, int(shape[0]), rank, dtype))
        return found

    def _check(self, manifest: Manifest) -> None:
        # A tensor without elements has no slice in any file; the manifest alone knows it.
        for (role, name), parts in self._pieces_of.items():
            if role not in manifest.roles.get(name, {}):
                raise CheckpointError(f"rank {parts[0].rank} holds {role} {name!r}, which the manifest does not know")
            if parts[0].dtype != manifest.roles[name][role]:
                raise CheckpointError(
                    f"{role} {name!r} is {parts[0].dtype} in the files and {manifest.roles[name][role]} in the manifest"
                )
        everything = {(role, name): self._pieces_of.get((role, name), []) for name in manifest.roles
                      for role in manifest.roles[name]}  # fmt: skip
        check(everything, manifest.shapes)


def _span(whole: Box, box: Box) -> tuple[int, int]:
    """From the first element of a box to one past its last, in the order of the whole tensor."""
    return whole.number_of(box.offsets), whole.number_of([stop - 1 for stop in box.stops]) + 1
