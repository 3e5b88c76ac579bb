"""Checkpoints that ``torch.distributed.checkpoint.load`` reads, written from slices of the state, at any world size."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from zoo.checkpointing.errors import CheckpointError, together
from zoo.checkpointing.foreign.dcp import BUFFERS, METADATA
from zoo.checkpointing.foreign.local import make_folder, replace, sync
from zoo.checkpointing.format.names import StateSlice
from zoo.comm import Communicator
from zoo.layout import Box, tiles

_Part = tuple[str, tuple[int, ...], str, tuple[int, ...], tuple[int, ...], str, int, int]
"""Key, shape, dtype; offsets and sizes of the box (of a value: no shape); file, and where in it."""


def save_dcp(
    folder: str | os.PathLike[str],
    slices: Iterable[StateSlice],
    scalars: Mapping[str, float],
    comm: Communicator | None = None,
    *,
    model: str = "model",
    optimizer: str = "optimizer",
) -> None:
    """Write the slices of all ranks as one DCP checkpoint. A collective.

    Parameters are ``<model>.<name>``, states ``<optimizer>.state.<name>.<role>``, also steps (scalars "step/<name>", as
    tensors of one element): the keys that DCP gives to ``{"model": model.state_dict(), "optimizer": …}`` with the names
    of ``torch.distributed.checkpoint.state_dict``. Buffers are with the parameters. Other scalars are
    ``zoo.scalars.<key>``. A slice is cut into at most 2d - 1 boxes. ``.metadata`` is put there last.

    Raises:
        CheckpointError: on all ranks alike when one of them cannot write; when slices overlap or leave something out.
    """
    comm = comm if comm is not None else Communicator()
    root = Path(folder)
    what = f"saving the DCP checkpoint {str(root)!r}"

    def begin() -> None:
        if comm.rank == 0:
            make_folder(root)
            (root / METADATA).unlink(missing_ok=True)

    def write() -> list[_Part]:
        return _write(root / f"__{comm.rank}_0.distcp", slices, numbers if comm.rank == 0 else {}, model, optimizer)

    together(comm, what, begin)
    numbers: dict[str, float] = {}
    for mine in together(comm, what, lambda: dict(scalars)):  # a rank has those of what it has a part of
        numbers |= mine
    parts = [part for theirs in together(comm, what, write) for part in theirs]
    together(comm, what, lambda: _commit(root, parts, optimizer) if comm.rank == 0 else None)


def _key(name: str, role: str, model: str, optimizer: str) -> str:
    return f"{model}.{name}" if role in ("parameter", "buffer") else f"{optimizer}.state.{name}.{role}"


def _write(
    path: Path, slices: Iterable[StateSlice], scalars: Mapping[str, float], model: str, optimizer: str
) -> list[_Part]:
    parts: list[_Part] = []
    with open(path, "wb") as file:

        def put(key: str, shape: tuple[int, ...], dtype: str, box: Box | None, value: Any) -> None:
            start = file.tell()
            buffer = io.BytesIO()  # torch.save writes positions from the beginning of its file
            torch.save(value, buffer)
            file.write(buffer.getbuffer())
            at = box if box is not None else Box((), ())
            parts.append((key, shape, dtype, at.offsets, at.sizes, path.name, start, file.tell() - start))

        buffers: list[str] = []
        for item in slices:
            buffers += [item.name] if item.role == "buffer" and item.name not in buffers else []
            key, shape = _key(item.name, item.role, model, optimizer), tuple(item.shape)
            flat = item.tensor.detach().cpu()
            boxes = [item.box] if item.box is not None else Box.whole(shape).run(item.start, item.start + item.length)
            if not item.length and 0 in shape:
                boxes = [Box.whole(shape)]
            done = 0
            for box in boxes:
                part = flat[done : done + box.numel].clone().view(box.sizes)
                put(key, shape, str(flat.dtype).removeprefix("torch."), box, part)
                done += box.numel
        if buffers:  # DCP has them among the model's tensors
            put(f"{BUFFERS}.{path.name}", (), "", None, buffers)
        for name, number in scalars.items():
            role, _, of = name.partition("/")
            if role == "step":
                put(f"{optimizer}.state.{of}.step", (), "float32", Box((), ()), torch.tensor(float(number)))
            else:
                put(f"zoo.scalars.{name}", (), "", None, number)
        file.flush()
        os.fsync(file.fileno())
    return parts


def _commit(root: Path, parts: list[_Part], optimizer: str) -> None:
    content = pickle.dumps(_metadata(parts, optimizer))
    sync(root)
    replace(root / METADATA, content)


def _metadata(parts: list[_Part], optimizer: str) -> Any:
    """The description in the classes of torch, by which its reader finds everything.

    Raises:
        CheckpointError: boxes of a tensor overlap or leave something out.
    """
    from torch.distributed.checkpoint import metadata as torch_metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for key, shape, dtype, offsets, sizes, file, start, length in parts:
        place = _StorageInfo(relative_path=file, offset=start, length=length)
        if not dtype:
            described[key] = torch_metadata.BytesStorageMetadata()
            places[torch_metadata.MetadataIndex(key)] = place
            continue
        entry = described.setdefault(
            key,
            torch_metadata.TensorStorageMetadata(
                properties=torch_metadata.TensorProperties(dtype=vars(torch)[dtype]), size=torch.Size(shape), chunks=[]
            ),
        )
        index = torch_metadata.MetadataIndex(key, torch.Size(offsets), len(entry.chunks))
        if index in places or entry.size != torch.Size(shape) or entry.properties.dtype is not vars(torch)[dtype]:
            raise CheckpointError(f"{key!r} is given twice, or in several shapes or dtypes: {shape} {dtype}")
        entry.chunks.append(torch_metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        places[index] = place
    for key, entry in described.items():
        boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in getattr(entry, "chunks", [])]
        if boxes and not tiles(boxes, tuple(entry.size)):
            raise CheckpointError(f"the slices of {key!r} overlap, or leave some of its shape {tuple(entry.size)} out")
    paths = _paths(described, optimizer)
    return torch_metadata.Metadata(state_dict_metadata=described, storage_data=places, planner_data=paths)


def _paths(described: Mapping[str, Any], optimizer: str) -> dict[str, tuple[Any, ...]]:
    """Key → the keys of the nested dicts that it is made of."""
    found: dict[str, tuple[Any, ...]] = {}
    states = f"{optimizer}.state."
    for key in described:
        first, _, rest = key.partition(".")
        if key.startswith(states):  # a module of the model may be called "state" too
            name, _, role = key[len(states) :].rpartition(".")
            found[key] = (optimizer, "state", name, role)
        else:
            found[key] = (first, rest) if rest else (key,)
    return found
