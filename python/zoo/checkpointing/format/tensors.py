"""safetensors files written one tensor after the other, so that what is saved need not be in memory together.

The format (https://github.com/huggingface/safetensors, README, "Format"): the length of the header in 8 bytes, little
endian; the header in JSON; the bytes of all tensors without gaps. The safetensors library writes such a file only from
tensors that all exist; it is what reads ours.
"""

from __future__ import annotations

import abc
import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.format.disk import LOCAL, beside
from zoo.checkpointing.format.names import parse_key
from zoo.layout import Lent

if TYPE_CHECKING:
    from typing_extensions import Self

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""What a checkpoint can hold, and the format's name for it. Reading and writing share this table."""

PAIRS = {torch.complex64: "F32", torch.complex128: "F64"}
"""Complex numbers are pairs of real ones in a file, in one more dim of 2: older libraries, which know no code for them,
refuse a whole file for one."""
COMPLEX = "zoo.complex"
"""In the metadata of a header: the keys of such pairs, as a JSON list."""

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Entry:
    """A flat tensor to be written; ``load`` is called once, when its turn comes. What was ``lent`` is read instead, in
    parts, and released."""

    key: str
    dtype: torch.dtype
    length: int
    load: Callable[[], torch.Tensor]
    lent: Lent | None = None


class NewFile(abc.ABC):
    """A file of tensors that come in any order, of which there is all or nothing.

    What it will hold is said at the beginning. It is written beside its place, under a name with random digits, until
    :meth:`commit` puts it there; a file of the same name stays readable until then. As a context manager it discards
    what was not committed. Where tensors go, and what is around them, is for its kinds to say.
    """

    def __init__(self, path: Path, described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._path, self._described, self._missing = path, dict(described), set(described)
        self._temporary = beside(path)
        self._file = open(self._temporary, "xb")  # noqa: SIM115  discard() closes it
        try:
            self._begin()
        except BaseException:
            self.discard()
            raise

    @abc.abstractmethod
    def _begin(self) -> None:
        """Write what comes before tensors."""

    @abc.abstractmethod
    def _place_of(self, key: str) -> int:
        """The first byte of a tensor."""

    def _wrote(self, key: str, raw: memoryview) -> None:  # noqa: B027  only some have to know
        """The next bytes of a tensor were written."""

    def _end(self) -> None:  # noqa: B027  only some have one
        """Write what comes after tensors."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Write a tensor; its memory may be used again afterwards.

        Raises:
            CheckpointError: it is not what was said of it, or was put before.
        """
        if key not in self._missing:
            wrong = "was put before" if key in self._described else "was not announced"
            raise CheckpointError(f"the tensor {key!r} {wrong}; {str(self._path)!r} cannot take it")
        dtype, shape = self._described[key]
        if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{key!r} was announced as {dtype} of shape {shape} and is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}"
            )
        self._file.seek(self._place_of(key))
        # By way of a small copy: torch resizes no storage any more that numpy has seen, and parameters come and go.
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        for part in torch.split(flat, _PIECE_BYTES // dtype.itemsize):
            raw = _raw(part.to("cpu", copy=True))
            self._file.write(raw)
            self._wrote(key, raw)
        self._missing.discard(key)

    def commit(self) -> None:
        """Force the file to the disk and put it in its place.

        Raises:
            CheckpointError: a tensor is missing.
        """
        if self._missing:
            raise CheckpointError(
                f"{str(self._path)!r} would lack {len(self._missing)} tensors: {', '.join(sorted(self._missing)[:5])}"
            )
        self._end()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._path)
        LOCAL.sync_directory(self._path.parent)

    def discard(self) -> None:
        """Remove what was not committed."""
        with contextlib.suppress(OSError):  # closing writes what was buffered, which nobody wants any more
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def check_dtype(what: str, dtype: torch.dtype) -> None:
    """Raise CheckpointError for a dtype that the format has no code for."""
    if dtype not in CODES and dtype not in PAIRS:
        held = ", ".join(map(str, (*CODES, *PAIRS)))
        raise CheckpointError(f"{what} is {dtype}; a safetensors file holds {held}.")


class TensorFile(NewFile):
    """A safetensors file of tensors that come in any order: see :class:`NewFile`.

    Args:
        path: of the file, in a folder that exists.
        described: dtype and shape by key.
        metadata: strings by name, for the header.

    Raises:
        CheckpointError: a dtype that the format has no code for.
        OSError: the file cannot be written.
    """

    def __init__(
        self, path: Path, described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        # Wide elements first, as in write_data; the sort is stable, so that what comes in order is written in order.
        ordered = sorted(described.items(), key=lambda item: -item[1][0].itemsize)
        header, self._offsets = header_of([(key, dtype, shape) for key, (dtype, shape) in ordered], metadata)
        self._head = len(header).to_bytes(8, "little") + header
        super().__init__(path, described)

    def _begin(self) -> None:
        self._file.write(self._head)

    def _place_of(self, key: str) -> int:
        return len(self._head) + self._offsets[key]


def header_of(
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str], multiple: int = 8
) -> tuple[bytes, dict[str, int]]:
    """The header, which with its length before it has a multiple of ``multiple`` bytes; where after it each begins."""
    pairs = [key for key, dtype, _ in tensors if dtype in PAIRS]
    said = {**metadata, COMPLEX: json.dumps(pairs)} if pairs else dict(metadata)
    described: dict[str, object] = {"__metadata__": said}
    offsets: dict[str, int] = {}
    end = 0
    for key, dtype, shape in tensors:
        if key in described:
            raise CheckpointError(f"a safetensors file has room for no tensor of the name {key!r}; give it another one")
        check_dtype(repr(key), dtype)
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        offsets[key] = begin
        inside = [*shape, 2] if dtype in PAIRS else list(shape)
        code = PAIRS[dtype] if dtype in PAIRS else CODES[dtype]
        described[key] = {"dtype": code, "shape": inside, "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    return text + b" " * (-(len(text) + 8) % multiple), offsets


def flat_of(entry: Entry) -> torch.Tensor:
    """Its tensor, loaded, contiguous; on whatever device it is."""
    tensor = entry.load()
    if tensor.dim() != 1 or tensor.numel() != entry.length or tensor.dtype is not entry.dtype:
        role, name, _ = parse_key(entry.key)
        raise CheckpointError(
            f"the slice of {role} {name!r} says {entry.length} elements of {entry.dtype} and comes with a tensor of "
            f"shape {tuple(tensor.shape)} of {tensor.dtype}; it must be flat and of that length"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _raw(flat: torch.Tensor) -> memoryview:
    raw: Any = flat.detach().cpu().contiguous().view(torch.uint8).numpy()
    return memoryview(raw)
