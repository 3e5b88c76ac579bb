"""Models as Hugging Face keeps them: safetensors files, sharded with an index; read lazily, and written.

``model.safetensors`` alone, or ``model-00001-of-00003.safetensors`` … with ``model.safetensors.index.json``:
``{"metadata": {"total_size": bytes}, "weight_map": {name: file}}``. The format of a file is described in
https://github.com/huggingface/safetensors (README, "Format"). Files of such folders may be links: the cache of
Hugging Face is made of them. Names of files in an index may not lead out of the folder.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.local import make_folder, replace
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint
from zoo.checkpointing.foreign.regions import MAX_DIMS, Region, StoredTensor, is_size
from zoo.checkpointing.format.tensors import CODES, COMPLEX, PAIRS, TensorFile

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}\.safetensors")
_MAX_HEADER_BYTES = 100 << 20
_DTYPES = {**{code: dtype for dtype, code in CODES.items()}, "C64": torch.complex64}
_COMPLEX = {code: dtype for dtype, code in PAIRS.items()}


# -- reading ----------------------------------------------------------------------------------------------------------


def load_safetensors(path: str | os.PathLike[str]) -> ForeignCheckpoint:
    """A safetensors file, or a folder of them with an index, with everything in role "parameter".

    ``meta["metadata"]`` is what the headers (of several files, together) and the index say besides tensors.

    Raises:
        CheckpointError: a file that is missing or damaged, tensors that overlap or that the index places elsewhere, a
            name that leads out of the folder, or a folder with neither an index nor exactly one file.
    """
    place = Path(path)
    if place.is_dir():
        return _load_folder(place)
    found = ForeignCheckpoint(place.name, place)
    tensors, metadata = read_header(place)
    for name, tensor in tensors.items():
        found.add_whole(name, "parameter", tensor)
    found.meta["metadata"] = metadata
    return found


def _load_folder(folder: Path) -> ForeignCheckpoint:
    found = ForeignCheckpoint(folder.name, folder)
    if not (folder / INDEX).exists():
        files = sorted(file.name for file in folder.glob("*.safetensors"))
        if SINGLE in files:
            files = [SINGLE]
        if len(files) != 1:
            raise CheckpointError(
                f"{str(folder)!r} has no {INDEX} and {len(files)} files *.safetensors; name the file that is meant"
            )
        return load_safetensors(folder / files[0])
    index = _json(Region.open(folder / INDEX, follow_links=True), f"the index {str(folder / INDEX)!r}")
    weights = index.get("weight_map")
    if not isinstance(weights, dict):
        raise CheckpointError(f"the index {str(folder / INDEX)!r} has no weight_map")
    metadata: dict[str, Any] = dict(index["metadata"]) if isinstance(index.get("metadata"), dict) else {}
    by_file: dict[str, list[str]] = {}
    for name, file in weights.items():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise CheckpointError(
                f"the index places {name[:80]!r} in {str(file)[:80]!r}, which is no file of its folder"
            )
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        tensors, said = read_header(folder / file)
        metadata |= said
        if set(names) != set(tensors):
            odd = sorted(set(names) ^ set(tensors))
            where = "is not in it" if odd[0] in names else "is in it, and the index does not say so"
            raise CheckpointError(f"{odd[0][:80]!r} {where}: {file} does not fit the index ({len(odd)} such tensors)")
        for name, tensor in tensors.items():
            found.add_whole(name, "parameter", tensor)
    found.meta["metadata"] = metadata
    return found


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """The tensors of a file, unread, and its metadata.

    Raises:
        CheckpointError: it is not in the format, or its tensors are not its bytes, each once.
    """
    region = Region.open(path, follow_links=True)
    size = int.from_bytes(region.bytes(0, 8), "little") if region.size >= 8 else -1
    if not 2 <= size <= min(region.size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(f"the file {path.name} is not in the safetensors format: no header of {size} bytes")
    header = _json(region.part(8, size, f"the header of {path.name}"), f"the header of {path.name}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"the header of {path.name} has metadata that is no dict")
    data = region.part(8 + size, region.size - 8 - size, path.name)
    tensors, ranges, pairs = {}, [], _pairs(metadata, path.name)
    for name, entry in header.items():
        tensors[name], ends = _tensor(name, entry, data, complex_numbers=name in pairs)
        ranges.append(ends)
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            raise CheckpointError(f"the tensors of {path.name} overlap or leave bytes out at byte {min(start, end)}")
        end = stop
    if end != data.size:
        raise CheckpointError(f"the file {path.name} has {data.size} bytes of tensors; its header describes {end}")
    return tensors, metadata


def _pairs(metadata: dict[str, Any], file: str) -> set[str]:
    """The names of complex tensors, which are in the file as pairs of real numbers."""
    text = metadata.get(COMPLEX)
    if text is None:
        return set()
    try:
        names = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"the header of {file} has {COMPLEX!r}: {str(text)[:80]}, which is no list of names")
    return set(names)


def _tensor(
    name: str, entry: Any, data: Region, *, complex_numbers: bool = False
) -> tuple[StoredTensor, tuple[int, int]]:
    entry = entry if isinstance(entry, dict) else {}
    shape, ends = entry.get("shape"), entry.get("data_offsets")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    if complex_numbers and isinstance(shape, list) and shape[-1:] == [2]:
        dtype, shape = _COMPLEX.get(str(entry.get("dtype"))), shape[:-1]
    right = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(map(is_size, shape))
    right = right and isinstance(ends, list) and len(ends) == 2 and all(map(is_size, ends))
    if dtype is None or not right or math.prod(shape) * dtype.itemsize != ends[1] - ends[0]:
        raise CheckpointError(
            f"{name[:80]!r} in {data.path.name} is described by {str(entry)[:120]}, which does not fit"
        )
    part = data.part(ends[0], ends[1] - ends[0], data.path.name)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return StoredTensor.checked(part, dtype, 0, shape, strides, what=repr(name[:80])), (ends[0], ends[1])


def _json(region: Region, what: str) -> dict[str, Any]:
    if region.size > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{what} has {region.size} bytes; at most {_MAX_HEADER_BYTES} are read")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise CheckpointError(f"{what} has a key twice")
        return found

    try:
        document = json.loads(region.bytes().decode("utf-8"), object_pairs_hook=pairs)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is no JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{what} is no JSON object")
    return document


# -- writing ----------------------------------------------------------------------------------------------------------


def write_safetensors(
    folder: str | os.PathLike[str],
    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    max_shard_bytes: int = 5 * 10**9,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write tensors as a model of Hugging Face; returns the files.

    A shard takes tensors in the order of ``described`` until the next one would make it larger than
    ``max_shard_bytes``; a larger tensor has one for itself. One file needs no index. Files are written beside their
    places; they are put there together when all are whole, and the index last. Of a model that was there before neither
    an index nor a single file stays, which readers would take for this one.

    Args:
        described: dtype and shape by name.
        tensors: (name, tensor), each of them once, in any order; one is in memory at a time.
        metadata: strings for the header of each file; ``format`` is "pt" if not given.

    Raises:
        CheckpointError: as :class:`zoo.checkpointing.TensorFile` does.
    """
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes={max_shard_bytes}; it is a number of bytes from 1 on")
    root = Path(folder)
    make_folder(root)
    shards = _shards(described, max_shard_bytes)
    many = len(shards)
    names = [SINGLE] if many == 1 else [f"model-{i + 1:05d}-of-{many:05d}.safetensors" for i in range(many)]
    place = {name: number for number, shard in enumerate(shards) for name in shard}
    head = {"format": "pt", **(metadata or {})}
    files: list[TensorFile] = []
    missing = set(described)
    try:
        for name, shard in zip(names, shards, strict=True):
            files.append(TensorFile(root / name, {key: described[key] for key in shard}, head))
        for name, tensor in tensors:
            if name not in place:
                raise CheckpointError(f"the tensor {name!r} was not announced; {str(root)!r} cannot take it")
            files[place[name]].put(name, tensor)
            missing.discard(name)
        if missing:
            raise CheckpointError(f"{str(root)!r} would lack {len(missing)} tensors, {sorted(missing)[:3]} among them")
        if many > 1:  # whatever ends this in the middle, no index has files of two models
            (root / INDEX).unlink(missing_ok=True)
        for file in files:
            file.commit()
    finally:
        for file in files:
            file.discard()
    if many > 1:
        total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in described.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: names[place[name]] for name in described}}
        replace(root / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        (root / SINGLE).unlink(missing_ok=True)  # of what was here before: readers take it before an index
    else:
        (root / INDEX).unlink(missing_ok=True)  # of what was here before
    return [root / name for name in names]


def _shards(described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in described.items():
        size = math.prod(shape) * dtype.itemsize
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
