"""Checkpoints of ``torch.distributed.checkpoint``, read; :mod:`zoo.checkpointing.foreign.dcp_writing` writes them.

A folder with ``.metadata``, a pickle that says which box of which tensor is which bytes of which file (torch's
weights-only reader refuses it), and files in which each box is what ``torch.save`` makes of it.

=================================================== =================================================================
key                                                 becomes
=================================================== =================================================================
``model.<name>``, or any key of a flat dict         role "parameter" of ``<name>`` (of the key)
``optimizer.state.<name>.<state>``, tensors         role ``<state>``; numbers, and tensors without dims where the
                                                    parameter has dims: scalars
``optimizer.param_groups.…``, other values          ``meta["values"]``, under the key
``zoo.scalars.<key>``, ``zoo.buffers.<file>``       scalars, and names of buffers: written by zoo
``optimizer.zoo.<key>``                             scalars ``zero/<key>``: written by :func:`live`
=================================================== =================================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zoo.checkpointing.errors import CheckpointError, together
from zoo.checkpointing.foreign.pieces import BoxPart, ForeignCheckpoint
from zoo.checkpointing.foreign.records import Record, plain
from zoo.checkpointing.foreign.regions import MAX_DIMS, Region, StoredTensor, is_size
from zoo.checkpointing.foreign.torch_files import load_torch
from zoo.checkpointing.foreign.unpickling import unpickle
from zoo.comm import Communicator
from zoo.layout import Box

METADATA = ".metadata"
BUFFERS = "zoo.buffers"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")
_KINDS = "torch.distributed.checkpoint.metadata."
_Single = tuple[str, str, BoxPart, torch.dtype]
"""Name, role, the one part and the dtype of a tensor without dims."""


def load_dcp(
    folder: str | os.PathLike[str],
    comm: Communicator | None = None,
    *,
    model: str = "model",
    optimizer: str = "optimizer",
) -> ForeignCheckpoint:
    """Open what ``torch.distributed.checkpoint.save`` wrote. A collective.

    Args:
        model, optimizer: under which keys the model's and the optimizer's states were saved, with dots between
            the keys of dicts. A checkpoint in which nothing is under ``model`` is the model's state itself.

    Raises:
        CheckpointError: on all ranks alike, naming what is missing or damaged, boxes that overlap or leave something
            out, and files outside of the folder. Each box is compared with its checksum when it is read.
    """
    comm = comm if comm is not None else Communicator()
    opened: list[ForeignCheckpoint] = []
    together(
        comm,
        f"loading the DCP checkpoint {str(folder)!r}",
        lambda: opened.append(_open(Path(folder), model, optimizer)),
    )
    return opened[0]


def _open(folder: Path, model: str, optimizer: str) -> ForeignCheckpoint:
    raw = Region.open(folder / METADATA)
    if raw.size > 2 << 30:
        raise CheckpointError(f"{str(folder / METADATA)!r} has {raw.size} bytes; at most 2 GiB are read")
    what = f"the metadata of {folder.name!r}"
    read = unpickle(raw.bytes(), what)
    fields = _fields(read.value, "Metadata", what)
    found = ForeignCheckpoint(folder.name, folder)
    found.unknown = [(METADATA, unknown) for unknown in read.unknown]
    described = fields.get("state_dict_metadata")
    if not isinstance(described, dict) or any(not isinstance(key, str) for key in described):
        raise CheckpointError(f"{what} describes no tensors by name")
    places = _places(folder, fields.get("storage_data"), what)
    nested = any(key.startswith(f"{model}.") for key in described)
    values: dict[str, Any] = {}
    single: list[_Single] = []
    ordered = sorted(described.items(), key=lambda item: not item[0].startswith(f"{BUFFERS}."))
    for key, entry in ordered:
        if not isinstance(entry, Record):
            raise CheckpointError(f"{what} describes {key[:80]!r} by a {type(entry).__name__}")
        if entry.kind == f"{_KINDS}BytesStorageMetadata":
            region = places.get((key, None))
            if region is None:
                raise CheckpointError(f"{what} says {key[:80]!r} is there, and not where")
            _add_value(found, key, region, values, optimizer)
            continue
        fields = _fields(entry, "TensorStorageMetadata", what)
        single += _add_tensor(found, key, fields, places, nested, (model, optimizer))
    _add_single(found, single)
    found.meta["values"] = values
    return found


def _fields(value: Any, kind: str, what: str) -> dict[str, Any]:
    if not isinstance(value, Record) or value.kind != _KINDS + kind:
        raise CheckpointError(f"{what} has a {getattr(value, 'kind', type(value).__name__)} where {kind} must be")
    return value.fields


def _places(folder: Path, storage: Any, what: str) -> dict[tuple[str, Any], Region]:
    """(key, offsets of a box or None) → its bytes."""
    if not isinstance(storage, dict):
        raise CheckpointError(f"{what} does not say where tensors are")
    files: dict[str, Region] = {}
    found: dict[tuple[str, Any], Region] = {}
    for index, place in storage.items():
        key = _fields(index, "MetadataIndex", what)
        info = place.fields if isinstance(place, Record) and place.known else {}
        name, start, size = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(name, str) or not _FILE.fullmatch(name) or not is_size(start) or not is_size(size):
            raise CheckpointError(f"{what} places a tensor in {str(name)[:80]!r}, which is no file of its folder")
        if info.get("transform_descriptors"):
            raise CheckpointError(f"{what} has transformed (compressed) tensors, which are not read")
        if name not in files:
            files[name] = Region.open(folder / name)
        offsets, fqn = key.get("offset"), key.get("fqn")
        box = tuple(offsets) if isinstance(offsets, torch.Size) else None
        if not isinstance(fqn, str) or (fqn, box) in found:
            raise CheckpointError(f"{what} places {str(fqn)[:80]!r} twice")
        found[fqn, box] = files[name].part(start or 0, size or 0, name)
    return found


def _add_tensor(
    found: ForeignCheckpoint, key: str, entry: Mapping[str, Any], places: Mapping[tuple[str, Any], Region],
    nested: bool, names: tuple[str, str],
) -> list[_Single]:  # fmt: skip
    """Gives a state without dims back: whether it is a number, the other parameters say."""
    properties, size, chunks = entry.get("properties"), entry.get("size"), entry.get("chunks")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    dtype = properties.fields.get("dtype") if isinstance(properties, Record) and dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or not isinstance(size, torch.Size) or not isinstance(chunks, list):
        raise CheckpointError(f"the metadata of {found.tag!r} describes {key[:80]!r} without dtype, size or parts")
    parts = []
    for chunk in chunks:
        box = _fields(chunk, "ChunkStorageMetadata", f"the metadata of {found.tag!r}")
        offsets, sizes = box.get("offsets"), box.get("sizes")
        if not isinstance(offsets, torch.Size) or not isinstance(sizes, torch.Size) or len(offsets) != len(sizes):
            raise CheckpointError(f"the metadata of {found.tag!r} has a part of {key[:80]!r} that is no box")
        region = places.get((key, tuple(offsets)))
        if region is None:
            raise CheckpointError(f"the metadata of {found.tag!r} says {key[:80]!r} is there, and not where")
        if len(sizes) > MAX_DIMS:
            raise CheckpointError(f"{key[:80]!r} in {found.tag!r} has {len(sizes)} dims")
        parts.append(BoxPart(Box(tuple(offsets), tuple(sizes)), SavedBox(region, dtype, tuple(sizes))))
    name, role = _role(key, nested, *names)
    if name in found.meta.get("buffers", ()):
        role = "buffer"
    if role not in ("parameter", "buffer") and not size and len(parts) == 1:
        return [(name, role, parts[0], dtype)]
    found.add_boxes(name, role, tuple(size), parts, dtype)
    return []


def _add_single(found: ForeignCheckpoint, single: list[_Single]) -> None:
    """States without dims: numbers, as the step is; but of a parameter without dims those that are no number of any
    other parameter are tensors of its shape."""
    numbers = {"step"} | {role for name, role, _, _ in single if found.shapes.get(name) != ()}
    for name, role, part, dtype in single:
        if role in numbers:
            found.scalars[f"{role}/{name}"] = float(part.source.read()[0])
        else:
            found.add_boxes(name, role, (), [part], dtype)


def _role(key: str, nested: bool, model: str, optimizer: str) -> tuple[str, str]:
    """(name, role) of a key."""
    if key.startswith(f"{optimizer}.state."):
        name, _, role = key[len(optimizer) + len(".state.") :].rpartition(".")
        return name, role
    if nested and key.startswith(f"{model}."):
        return key[len(model) + 1 :], "parameter"
    return key, "parameter"


def _add_value(found: ForeignCheckpoint, key: str, region: Region, values: dict[str, Any], optimizer: str) -> None:
    read = load_torch(region)
    found.unknown += [(region.path.name, unknown) for unknown in read.unknown]
    if isinstance(read.value, Record) and not read.value.known:
        return  # listed as unknown
    value = plain(read.value, f"{key[:80]!r} in {found.tag!r}")
    if type(value) in (int, float) and key.startswith("zoo.scalars."):
        found.scalars[key[len("zoo.scalars.") :]] = value
    elif key.startswith(f"{BUFFERS}.") and isinstance(value, list):
        found.meta.setdefault("buffers", []).extend(name for name in value if isinstance(name, str))
    elif type(value) in (int, float) and key.startswith(f"{optimizer}.state."):
        name, _, role = key[len(optimizer) + len(".state.") :].rpartition(".")
        found.scalars[f"{role}/{name}"] = value
    elif type(value) in (int, float) and key.startswith(f"{optimizer}.zoo."):
        found.scalars[f"zero/{key[len(optimizer) + len('.zoo.') :]}"] = value
    else:
        values[key] = value


class SavedBox:
    """A box of a tensor, as a file of ``torch.save`` inside of a file; opened and checked when it is first read."""

    def __init__(self, region: Region, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        numel = Box.whole(shape).numel
        if numel * dtype.itemsize > region.size:
            raise CheckpointError(f"a part of shape {shape} is said to be in {region.size} bytes of {region.path.name}")
        self.region, self.dtype, self.shape, self.numel = region, dtype, shape, numel

    @cached_property
    def _stored(self) -> StoredTensor:
        value = load_torch(self.region).value
        if not isinstance(value, StoredTensor) or value.shape != self.shape or value.dtype is not self.dtype:
            raise CheckpointError(
                f"{self.region.path.name} has something else at byte {self.region.start} than the {self.dtype} of "
                f"shape {self.shape} that the metadata describes"
            )
        return value

    def read(self, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Elements [start, start + length) of its row-major order, flat."""
        return self._stored.read(start, length)
