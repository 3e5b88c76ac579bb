"""zero_to_fp32: the whole weights of a zoo checkpoint in fp32, for whoever has torch and numpy, and not zoo.

    python zero_to_fp32.py CHECKPOINT_DIR OUTPUT [--tag TAG] [--safe_serialization] [--max_shard_size 5GB]

CHECKPOINT_DIR holds the folders of checkpoints and the file ``latest``. OUTPUT is a file (.bin, .pt, .pth: what
torch.load reads; .safetensors) or a folder, which gets files of at most --max_shard_size each and, where there are
several, the index that Hugging Face's libraries read. Tensors are read, compared with their checksums and written
piece by piece: memory stays small, whatever the model's size. Nothing is unpickled, and nothing that a file says is
imported or called.

This file imports the standard library, numpy and torch alone. It is a module of zoo.checkpointing, whose
``write_script`` puts a copy of it beside checkpoints. The format of checkpoints: zoo/checkpointing/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import json
import math
import os
import pickle
import re
import secrets
import stat
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch

BLOCK_BYTES = 1 << 20
PIECE_BYTES = 16 << 20
"""What is in memory at once of a tensor that goes to a file."""
TORCH_SUFFIXES = (".bin", ".pt", ".pth")
SAFE_SUFFIX = ".safetensors"
CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
PAIRS = {torch.complex64: "F32", torch.complex128: "F64"}
"""Complex numbers are pairs of real ones in a safetensors file, in one more dim of 2."""
COMPLEX = "zoo.complex"
"""In the metadata of its header: the names of such pairs, as a JSON list."""
_COLUMNS = {"state": "<i4", "start": "<i8", "length": "<i8", "file": "<i4", "offset": "<i8", "box": "<i4",
            "extents": "<i8", "sums": "<u4"}  # fmt: skip
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


class Source(Protocol):
    """An open checkpoint: that of this file, and zoo.checkpointing.Checkpoint."""

    tag: str

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def roles(self) -> Mapping[str, Mapping[str, str]]: ...
    @property
    def scalars(self) -> Mapping[str, Any]: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
    def read(self, name: str, role: str, start: int, length: int) -> torch.Tensor: ...


# -- which tensors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LazyTensor:
    """A whole tensor of a checkpoint, read when it is asked for, in ``dtype``."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Source

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in ``dtype``."""
        return self.numel * self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """Its elements in order, flat, some at a time."""
        step = PIECE_BYTES // 8
        for start in range(0, self.numel, step):
            yield self.source.read(self.name, self.role, start, min(step, self.numel - start)).to(self.dtype)

    def contiguous(self) -> torch.Tensor:
        """The tensor itself."""
        return self.source.read(self.name, self.role, 0, self.numel).to(self.dtype).view(self.shape)


def tensors_of(
    source: Source, *, role: str = "parameter", dtype: torch.dtype | None = torch.float32,
    exclude_frozen_parameters: bool = False,
) -> dict[str, LazyTensor]:  # fmt: skip
    """What a state dict of the model holds, by name: parameters (or that other role of them), and buffers with them.

    ``dtype``: of what has floating point; None: as it was saved. Names of one tied parameter have one LazyTensor.
    """
    roles = (role, "buffer") if role == "parameter" else (role,)
    frozen = _frozen(source) if exclude_frozen_parameters else frozenset()
    found: dict[str, LazyTensor] = {}
    for name, held in source.roles.items():
        mine = next((one for one in roles if one in held), None)
        if mine is not None and name not in frozen:
            saved = dtype_named(held[mine])
            wanted = dtype if dtype is not None and saved.is_floating_point else saved
            found[name] = LazyTensor(name, mine, source.shapes[name], wanted, source)
    if not found:
        there = sorted({one for roles_of in source.roles.values() for one in roles_of})
        raise ValueError(
            f"checkpoint {source.tag!r} has no tensor of the role {role!r}; it has {', '.join(there) or 'none'}"
        )
    tied = _model_meta(source).get("tied", {})
    for alias, name in tied.items() if isinstance(tied, dict) else ():
        if isinstance(name, str) and name in found:
            found.setdefault(str(alias), found[name])
    return found


def _model_meta(source: Source) -> dict[str, Any]:
    """What the job has said of the model: ``meta["model"] = {"frozen": [name, ...], "tied": {other name: name}}``."""
    said = source.meta.get("model")
    return said if isinstance(said, dict) else {}


def _frozen(source: Source) -> frozenset[str]:
    """Parameters that were not trained: as the job has said, else those that have no state of an optimizer."""
    said = _model_meta(source).get("frozen")
    if isinstance(said, list):
        return frozenset(map(str, said))
    parameters = {name for name, held in source.roles.items() if "parameter" in held}
    trained = {name for name in parameters if len(source.roles[name]) > 1}
    trained |= parameters & {key.partition("/")[2] for key in source.scalars}
    if not trained:
        raise ValueError(
            f"checkpoint {source.tag!r} does not tell which parameters are frozen: it has no state of an optimizer; "
            "leave out exclude_frozen_parameters"
        )
    return frozenset(parameters - trained)


def state_dict_of(tensors: Mapping[str, LazyTensor]) -> dict[str, torch.Tensor]:
    """All of them in memory; names of one tied parameter share it."""
    made: dict[int, torch.Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        if id(tensor) not in made:
            made[id(tensor)] = tensor.contiguous()
        found[name] = made[id(tensor)]
    return found


def dtype_named(name: object) -> torch.dtype:
    """torch's dtype of that name, as "float32"."""
    found = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__}")
    return found


# -- writing ----------------------------------------------------------------------------------------------------------


def bytes_of(size: int | str) -> int:
    """``"5GB"``, ``"500MB"``, ``"1GiB"`` or a number, in bytes. GB is 10⁹, GiB is 2³⁰."""
    found = re.fullmatch(r"(\d{1,18})\s*([A-Za-z]*)", str(size).strip())
    if not found or found[2].upper() not in _UNITS or int(found[1]) == 0:
        raise ValueError(f"max_shard_size = {size!r}; write a number of bytes, or one like '5GB', '500MB' or '1GiB'")
    return int(found[1]) * _UNITS[found[2].upper()]


def write_model(
    tensors: Mapping[str, LazyTensor], output: str | os.PathLike[str], *, safe: bool, max_shard_bytes: int | None,
    told: Callable[[int], None] = lambda num_bytes: None,
) -> list[Path]:  # fmt: skip
    """Write ``output``: one file, or with ``max_shard_bytes`` a folder of files of at most so many bytes of tensors.

    A tensor that is larger has a file of its own. Each file is in its place when it is whole, and the index, where
    there is one, comes last. ``told`` hears of every piece. Gives the files.
    """
    write = write_safetensors if safe else write_torch
    path = Path(os.path.abspath(output))
    if max_shard_bytes is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, tensors, told)
        return [path]
    path.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", SAFE_SUFFIX) if safe else ("pytorch_model", ".bin")
    shards = plan_shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        names = [f"{stem}{suffix}"]
    else:
        names = [f"{stem}-{k + 1:05d}-of-{len(shards):05d}{suffix}" for k in range(len(shards))]
    index = f"{stem}{suffix}.index.json"
    # Readers take a single file before an index, and an index before nothing: neither may be of another model.
    pattern = re.compile(re.escape(stem) + r"(-\d{5,}-of-\d{5,})?" + re.escape(suffix) + r"(\.index\.json)?")
    expected = {*names, *([index] if len(shards) > 1 else [])}
    others = sorted(name for name in os.listdir(path) if pattern.fullmatch(name) and name not in expected)
    if others:
        raise ValueError(f"{str(path)!r} holds {others[0]} of another model; give a folder without such files")
    (path / index).unlink(missing_ok=True)  # whatever ends this in the middle, no index has files of two models
    for name, shard in zip(names, shards, strict=True):
        write(path / name, shard, told)
    if len(shards) > 1:
        weights = {
            key: name
            for name, shard in zip(names, shards, strict=True)
            for key in (_each_once(shard) if safe else shard)
        }
        total = sum(tensor.nbytes for tensor in _each_once(tensors).values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2)
        with _whole(path / index) as file:
            file.write(text.encode() + b"\n")
        names.append(index)
    return [path / name for name in names]


def plan_shards(tensors: Mapping[str, LazyTensor], max_bytes: int) -> list[dict[str, LazyTensor]]:
    """In their order, each with as many as fit; names of one tied parameter are together."""
    shards: list[dict[str, LazyTensor]] = [{}]
    place: dict[int, dict[str, LazyTensor]] = {}
    room = max_bytes
    for name, tensor in tensors.items():
        if id(tensor) in place:
            place[id(tensor)][name] = tensor
            continue
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][name] = tensor
        place[id(tensor)] = shards[-1]
        room -= tensor.nbytes
    return shards


def _each_once(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    found: dict[int, str] = {}
    for name, tensor in tensors.items():
        found.setdefault(id(tensor), name)
    return {name: tensors[name] for name in found.values()}


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A new file, put in its place when it is whole and on the device."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _raw(piece: torch.Tensor) -> memoryview:
    return memoryview(piece.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type,unused-ignore]


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor], told: Callable[[int], None]) -> None:
    """https://github.com/huggingface/safetensors, README, "Format". A tied parameter is there once; the metadata names
    its others, as safetensors' ``save_model`` has it."""
    once = _each_once(tensors)
    first = {id(tensor): name for name, tensor in once.items()}
    aliases = {name: first[id(tensor)] for name, tensor in tensors.items() if name not in once}
    pairs = [name for name, tensor in once.items() if tensor.dtype in PAIRS]
    said = {"format": "pt", **aliases, **({COMPLEX: json.dumps(pairs)} if pairs else {})}
    described: dict[str, Any] = {"__metadata__": said}
    ordered = sorted(once.items(), key=lambda item: -item[1].dtype.itemsize)  # then all begin at whole elements
    end = 0
    for name, tensor in ordered:
        code = CODES.get(tensor.dtype) or PAIRS.get(tensor.dtype)
        if name in described:
            raise ValueError(
                f"a safetensors file has room for no tensor of the name {name!r}; take the format of torch"
            )
        if code is None:
            held = ", ".join(map(str, (*CODES, *PAIRS)))
            raise ValueError(f"{name!r} is {tensor.dtype}; a safetensors file holds {held}")
        shape = [*tensor.shape, 2] if tensor.dtype in PAIRS else list(tensor.shape)
        begin, end = end, end + tensor.nbytes
        described[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with _whole(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, tensor in ordered:
            for piece in tensor.pieces():
                file.write(_raw(piece))
                told(piece.nbytes)


class _Storage:
    """Stands for the memory of a tensor while a state dict is pickled."""

    def __init__(self, key: str, tensor: LazyTensor) -> None:
        self.key, self.tensor = key, tensor


class _Pickler(pickle.Pickler):
    """A state dict as torch.save pickles it: tensors name their memory, which lies in files of their own."""

    def __init__(self, file: io.BytesIO, keys: Mapping[int, str]) -> None:
        super().__init__(file, protocol=2)
        self._keys = keys

    def persistent_id(self, obj: Any) -> Any:
        """The tuple that torch.load knows."""
        if not isinstance(obj, _Storage):
            return None
        kind = _storage_of(obj.tensor.dtype)
        size = obj.tensor.nbytes if kind is torch.UntypedStorage else obj.tensor.numel
        return ("storage", kind, obj.key, "cpu", size)

    def reducer_override(self, obj: Any) -> Any:
        """Tensors are rebuilt by the functions that torch.load knows."""
        if not isinstance(obj, LazyTensor):
            return NotImplemented
        strides = [math.prod(d or 1 for d in obj.shape[k + 1 :]) for k in range(len(obj.shape))]
        storage = _Storage(self._keys[id(obj)], obj)
        given: tuple[Any, ...] = (storage, 0, obj.shape, tuple(strides), False, OrderedDict())
        if _storage_of(obj.dtype) is torch.UntypedStorage:
            return torch._utils._rebuild_tensor_v3, (*given, obj.dtype)
        return torch._utils._rebuild_tensor_v2, given


def _storage_of(dtype: torch.dtype) -> type:
    """The class that torch.save names for the memory of a tensor; it has none for the newer dtypes."""
    names = {
        torch.float64: "Double", torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half",
        torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
        torch.bool: "Bool", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
    }  # fmt: skip
    found: type = getattr(torch, f"{names[dtype]}Storage") if dtype in names else torch.UntypedStorage
    return found


def write_torch(path: Path, tensors: Mapping[str, LazyTensor], told: Callable[[int], None]) -> None:
    """What ``torch.load(path, weights_only=True)`` gives back as a dict: the archive of torch.save, written piece by
    piece. Names of one tied parameter share their memory there too."""
    keys = {id(tensor): str(k) for k, tensor in enumerate(_each_once(tensors).values())}
    memory = io.BytesIO()
    _Pickler(memory, keys).dump(dict(tensors))
    with _whole(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, content in (("data.pkl", memory.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            with _entry(archive, file, name) as entry:
                entry.write(content)
        for tensor in _each_once(tensors).values():
            with _entry(archive, file, f"data/{keys[id(tensor)]}") as entry:
                for piece in tensor.pieces():
                    entry.write(_raw(piece))
                    told(piece.nbytes)


def _entry(archive: zipfile.ZipFile, file: BinaryIO, name: str) -> Any:
    """An entry whose bytes begin at a multiple of 64 of the file, as torch has it, so that it can be mapped."""
    info = zipfile.ZipInfo(f"archive/{name}")
    begin = file.tell() + 30 + len(info.filename) + 20 + 4  # header, name, sizes of 64 bits, head of the padding
    padding = -begin % 64
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return archive.open(info, "w", force_zip64=True)


# -- CRC-32C ----------------------------------------------------------------------------------------------------------
# RFC 3720, appendix B.4. A block is 1024 lanes that go forward side by side, two bytes at a time, and then are joined
# in pairs: before another lane a lane has gone on over as many zeros as the other one has bytes.

_LANE_BYTES = 1024


@functools.lru_cache(maxsize=1)
def _two_bytes() -> Any:
    table = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        table = (table >> 1) ^ (np.uint32(0x82F63B78) * (table & 1))
    return table


@functools.lru_cache(maxsize=64)
def _over_zeros(power: int) -> Any:
    """What each bit of a register becomes over 2**power zero bytes."""
    if power == 0:
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        for _ in range(8):
            bits = (bits >> 1) ^ (np.uint32(0x82F63B78) * (bits & 1))
        return bits
    half = _over_zeros(power - 1)
    return _go_on(half, half)


def _go_on(bits: Any, registers: Any) -> Any:
    found = np.zeros_like(registers)
    for k in range(32):
        found ^= bits[k] * ((registers >> np.uint32(k)) & np.uint32(1))
    return found


def crc32c(blocks: Any) -> list[int]:
    """The CRC-32C of each block of 1 MiB of ``blocks``, (n,) uint8; the last may be shorter."""
    num_blocks = -(-len(blocks) // BLOCK_BYTES)
    rest = len(blocks) % BLOCK_BYTES
    lasts = [BLOCK_BYTES] * num_blocks
    if rest:  # zeros before the bytes change nothing in a register that begins at 0
        whole, lasts[-1] = blocks[: len(blocks) - rest], rest
        zeros = np.zeros(BLOCK_BYTES - rest, np.uint8)
        blocks = np.concatenate([whole, zeros, blocks[len(whole) :]])
    words: Any = np.ascontiguousarray(blocks.view("<u2").reshape(-1, _LANE_BYTES // 2).T)
    table = _two_bytes()
    registers: Any = np.zeros(words.shape[1], np.uint32)
    for row in words:
        registers = table[(registers ^ row) & np.uint32(0xFFFF)] ^ (registers >> np.uint32(16))
    registers, power = registers.reshape(num_blocks, BLOCK_BYTES // _LANE_BYTES), _LANE_BYTES.bit_length() - 1
    while registers.shape[1] > 1:
        registers = _go_on(_over_zeros(power), registers[:, 0::2]) ^ registers[:, 1::2]
        power += 1
    found = []
    for register, length in zip(registers[:, 0].tolist(), lasts, strict=True):
        begin = np.array([0xFFFFFFFF], np.uint32)
        for bit in range(length.bit_length()):
            if length >> bit & 1:
                begin = _go_on(_over_zeros(bit), begin)
        found.append(register ^ int(begin[0]) ^ 0xFFFFFFFF)
    return found


# -- reading ----------------------------------------------------------------------------------------------------------


def _open(path: Path) -> tuple[int, int]:
    """Descriptor and size of a plain file: no link, no pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be opened: {error.strerror}") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise ValueError(f"{str(path)!r} is not a plain file")
    return descriptor, found.st_size


def _content(path: Path, most: int) -> bytes:
    descriptor, size = _open(path)
    with open(descriptor, "rb") as file:
        if size > most:
            raise ValueError(f"{str(path)!r} has {size:,} bytes; at most {most:,} are expected")
        return file.read(size)


class Checkpoint:
    """A checkpoint of version 3 or 4, for reading; see :class:`Source`. Without a tag that which ``latest`` names.

    ``verify``: compare what is read with its checksums. A file is opened when something of it is read.
    """

    def __init__(self, directory: str | os.PathLike[str], tag: str | None = None, *, verify: bool = True) -> None:
        self._verify = verify
        self._files: dict[int, int] = {}
        root = Path(os.path.abspath(directory))
        if tag is None:
            tag = _content(root / "latest", 1000).decode("utf-8", "replace").strip()
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}", tag):
            raise ValueError(f"{tag!r} is not the name of a checkpoint")
        self.tag, self.path = tag, root / tag
        self._found: tuple[tuple[str, str], tuple[Any, Any, Any, Any]] | None = None
        self._blocks: OrderedDict[tuple[int, int], Any] = OrderedDict()
        try:
            document = self._manifest()
            self.meta: dict[str, Any] = dict(document["meta"])
            self.scalars: dict[str, Any] = dict(document["scalars"])
            self._read_index(document["index"])
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{str(self.path)!r} has a field that is missing or of the wrong kind: {error!r}"
            ) from None
        except ValueError as error:  # JSON's and numpy's own do not say where
            if str(self.path) in str(error):
                raise
            raise ValueError(f"the checkpoint {str(self.path)!r} cannot be read: {error}") from None

    def _manifest(self) -> dict[str, Any]:
        """What is in it, compared with its own checksum."""
        raw = _content(self.path / "manifest.json", 1 << 30)
        try:
            document = json.loads(raw)
        except ValueError as error:
            raise ValueError(f"the manifest of {str(self.path)!r} cannot be read: {error}") from None
        if not isinstance(document, dict) or document.get("format") != "zoo-checkpoint":
            raise ValueError(f"{str(self.path)!r} has a manifest of another format")
        if document.get("version") not in (3, 4):
            raise ValueError(
                f"the manifest of {str(self.path)!r} is of version {document.get('version')!r}, and this script reads "
                "3 and 4; `zoo ckpt export` reads all that there are"
            )
        content = {key: value for key, value in document.items() if key != "sha256"}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        if document.get("sha256", found := hashlib.sha256(text.encode()).hexdigest()) != found:
            raise ValueError(f"the manifest of {str(self.path)!r} has another SHA-256 than it says: it was changed")
        return document

    def _read_index(self, entry: dict[str, Any]) -> None:
        if not re.fullmatch(r"[0-9a-f]{16}\.index", entry["name"]):
            raise ValueError(f"the manifest names the index {entry['name']!r}")
        data = _content(self.path / entry["name"], int(entry["size"]))
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(
                f"the index {entry['name']} has another SHA-256 than the manifest says: it was changed or damaged"
            )
        size = int.from_bytes(data[8:16], "little")
        if data[:8] != b"zooindex" or size > len(data) - 16:
            raise ValueError("the index is cut off, or is none")
        header, body = json.loads(data[16 : 16 + size]), memoryview(data)[16 + size :]
        if header["block_bytes"] != BLOCK_BYTES:
            raise ValueError(f"the index has blocks of {header['block_bytes']!r} bytes")
        self._columns: dict[str, Any] = {}
        for name, kind in _COLUMNS.items():
            none = [0, 0] if name in ("box", "extents") else None  # version 3 has none
            count, place = header["columns"].get(name, none)
            if min(count, place) < 0 or place + count * np.dtype(kind).itemsize > len(body):
                raise ValueError(f"the column {name!r} of the index lies outside of it")
            self._columns[name] = np.frombuffer(body, dtype=kind, count=count, offset=place)
        self._entries = [_file_entry(entry, len(self._columns["sums"])) for entry in header["files"]]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.roles: dict[str, dict[str, str]] = {}
        self._number: dict[tuple[str, str], int] = {}
        for number, (name, role, dtype, shape) in enumerate(header["states"]):
            dims = tuple(_size(dim) for dim in shape)
            if self.shapes.setdefault(str(name), dims) != dims or (name, role) in self._number:
                raise ValueError(f"the index has {role} {name!r} twice")
            self.roles.setdefault(str(name), {})[str(role)] = dtype
            self._number[str(name), str(role)] = number
        self._check([dtype_named(dtype).itemsize for _, _, dtype, _ in header["states"]])

    def _check(self, itemsizes: list[int]) -> None:
        """Pieces lie in their files, are sorted, and have together no more bytes than the files."""
        c = self._columns
        state, length, file, offset = c["state"], c["length"], c["file"], c["offset"]
        if not len(c["box"]):
            c["box"] = np.full(len(state), -1, "<i4")
        if len({len(c[name]) for name in ("state", "start", "length", "file", "offset", "box")}) > 1:
            raise ValueError("the columns of the index have different lengths")
        if not len(state):
            self._rows = np.zeros(len(itemsizes) + 1, np.int64)
            return
        if state.min() < 0 or state.max() >= len(itemsizes) or file.min() < 0 or file.max() >= len(self._entries):
            raise ValueError("the index names a tensor or a file that it does not have")
        sizes = np.array([size for _, size, _ in self._entries], dtype=np.int64)
        each = np.array(itemsizes, dtype=np.int64)[state]
        wrong = (c["start"] < 0) | (length < 0) | (offset < 0) | (offset > sizes[file])
        if np.any(wrong | (length > (sizes[file] - offset) // each)):
            raise ValueError("the index has elements outside of their file")
        held = np.zeros((2, len(sizes)), dtype=np.int64)  # in units of 1 and of 2**31 bytes: sums stay exact
        np.add.at(held[0], file, (length * each) & 0x7FFFFFFF)
        np.add.at(held[1], file, (length * each) >> 31)
        if any(low + (high << 31) > size for low, high, size in zip(*held.tolist(), sizes.tolist(), strict=True)):
            raise ValueError("the index has some bytes of a file twice")
        if np.any(state[1:] < state[:-1]):
            raise ValueError("the columns of the index are not sorted")
        self._rows = np.searchsorted(state, np.arange(len(itemsizes) + 1))

    def _pieces(self, name: str, role: str) -> tuple[Any, Any, Any, Any]:
        """start, length, file, offset of a tensor's pieces, which have each element once."""
        if self._found is not None and self._found[0] == (name, role):
            return self._found[1]
        number = self._number[name, role]
        rows = slice(int(self._rows[number]), int(self._rows[number + 1]))
        start, length, file, offset = (self._columns[key][rows] for key in ("start", "length", "file", "offset"))
        filled = length > 0
        if np.any(self._columns["box"][rows] >= 0):
            start, length, file, offset = self._in_rows(name, role, np.flatnonzero(filled) + rows.start)
        else:
            start, length, file, offset = start[filled], length[filled], file[filled], offset[filled]
        numel, ends = math.prod(self.shapes[name]), start + length
        if [*start.tolist(), numel] != [0, *ends.tolist()]:
            raise ValueError(f"checkpoint {self.tag!r} has not every element of {role} {name!r} once")
        self._found = (name, role), (start, length, file, offset)
        return self._found[1]

    def _in_rows(self, name: str, role: str, numbers: Any) -> list[Any]:
        """start, length, file, offset of runs in order; a piece that is a box is one for each of its rows."""
        shape, each = self.shapes[name], dtype_named(self.roles[name][role]).itemsize
        found: list[list[Any]] = [[], [], [], []]
        for number in numbers.tolist():
            first, length, file, offset, at = (
                int(self._columns[key][number]) for key in ("start", "length", "file", "offset", "box")
            )
            starts, width = np.array([first], np.int64), length
            if at >= 0:
                extents = self._columns["extents"][at : at + 2 * len(shape)].tolist()
                starts, width = _rows_of(extents[: len(shape)], extents[len(shape) :], shape, length)
                if int(starts[0]) != first:
                    raise ValueError(f"the index has a box of {role} {name!r} that does not begin at element {first}")
            found[0].append(starts)
            found[1].append(np.full(len(starts), width, np.int64))
            found[2].append(np.full(len(starts), file, np.int64))
            found[3].append(offset + np.arange(len(starts), dtype=np.int64) * (width * each))
        columns = [np.concatenate(parts) for parts in found]
        order = np.argsort(columns[0], kind="stable")
        return [column[order] for column in columns]

    def read(self, name: str, role: str, start: int, length: int) -> torch.Tensor:
        """Elements [start, start + length) of a tensor in one role, flat, in the dtype they were saved in."""
        starts, lengths, files, offsets = self._pieces(name, role)
        dtype = dtype_named(self.roles[name][role])
        out = torch.empty(length, dtype=dtype)
        memory, each = out.view(torch.uint8).numpy(), dtype.itemsize
        first, last = np.searchsorted(starts + lengths, start, "right"), np.searchsorted(starts, start + length, "left")
        for row in range(int(first), int(last)):
            low = max(int(starts[row]), start)
            high = min(int(starts[row]) + int(lengths[row]), start + length)
            place = int(offsets[row]) + (low - int(starts[row])) * each
            self._load(int(files[row]), place, memory[(low - start) * each : (high - start) * each])
        return out

    def _load(self, file: int, begin: int, memory: Any) -> None:
        at, end = begin, begin + len(memory)
        while at < end:
            block = at // BLOCK_BYTES
            whole = (end - at) // BLOCK_BYTES if at % BLOCK_BYTES == 0 else 0
            if whole > 1:  # straight
                count = min(whole, PIECE_BYTES // BLOCK_BYTES)
                found, skipped = self._bytes(file, block, count), 0
            else:
                found, skipped = self._kept(file, block), at % BLOCK_BYTES
            taken = min(len(found) - skipped, end - at)
            memory[at - begin : at - begin + taken] = found[skipped : skipped + taken]
            at += taken

    def _kept(self, file: int, block: int) -> Any:
        """A block that neighbours have too."""
        found = self._blocks.pop((file, block), None)
        found = self._blocks[file, block] = self._bytes(file, block, 1) if found is None else found
        if len(self._blocks) > 32:
            self._blocks.popitem(last=False)
        return found

    def _bytes(self, file: int, block: int, count: int) -> Any:
        """So many blocks of a file, compared with their sums."""
        name, size, first_sum = self._entries[file]
        if file not in self._files:
            self._files[file], found = _open(self.path / name)
            if found != size:
                raise ValueError(f"the file {name} has {found} bytes; the index says {size}")
        begin = block * BLOCK_BYTES
        data = os.pread(self._files[file], min(count * BLOCK_BYTES, size - begin), begin)
        if len(data) < min(count * BLOCK_BYTES, size - begin):
            raise ValueError(f"the file {name} ends at byte {begin + len(data)} of {size}")
        memory = np.frombuffer(data, np.uint8)
        if self._verify:
            for number, crc in enumerate(crc32c(memory), block):
                if crc != int(self._columns["sums"][first_sum + number]):
                    raise ValueError(
                        f"block {number} (of 1 MiB) of the file {name} has another CRC-32C than the index says: it was "
                        "changed or damaged after it was written"
                    )
        return memory

    def close(self) -> None:
        """Close its files."""
        files, self._files = self._files, {}
        for descriptor in files.values():
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def _rows_of(offsets: list[int], sizes: list[int], shape: tuple[int, ...], length: int) -> tuple[Any, int]:
    """The first elements of the runs that a box of a tensor is, and how many elements each of them has."""
    fits = len(offsets) == len(sizes) == len(shape) and min([*offsets, *sizes], default=0) >= 0
    if not fits or any(map(int.__gt__, map(int.__add__, offsets, sizes), shape)) or math.prod(sizes) != length:
        raise ValueError(f"the index has a box with offsets {offsets} and sizes {sizes} in the shape {shape}")
    starts, stride, width, whole = np.zeros(1, np.int64), 1, 1, True
    for offset, size, dim in zip(offsets[::-1], sizes[::-1], shape[::-1], strict=True):
        if whole:  # the last dims, as far as they are all there, and the one before them
            width, starts, whole = width * size, starts + offset * stride, size == dim
        else:
            starts = ((offset + np.arange(size)) * stride)[:, None] + starts
            starts = starts.reshape(-1)
        stride *= dim
    return starts, width


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"the index has {value!r} in the place of a size")
    return value


def _file_entry(entry: Iterable[Any], num_sums: int) -> tuple[str, int, int]:
    name, size, first_sum = entry
    if not isinstance(name, str) or not re.fullmatch(r"[0-9a-f]{16}\.(constant\.)?\d{5,}\.safetensors", name):
        raise ValueError(f"the index names the file {name!r}")
    if _size(first_sum) + -(-_size(size) // BLOCK_BYTES) > num_sums:
        raise ValueError(f"the index has no checksums for all of the {size} bytes of {name}")
    return name, size, first_sum


# -- the functions of the documents, and the command ------------------------------------------------------------------


def place_of(output: str | os.PathLike[str], safe: bool | None, max_shard_size: int | str) -> tuple[bool, int | None]:
    """Whether OUTPUT gets safetensors, and the bytes of its shards; None where it is one file."""
    text = os.fspath(output)
    if text.endswith(SAFE_SUFFIX) and not os.path.isdir(text):
        if safe is False:
            raise ValueError(f"{text!r} is a name of safetensors, and the torch format is asked for")
        return True, None
    if text.endswith(TORCH_SUFFIXES) and not os.path.isdir(text):
        if safe:
            raise ValueError(f"{text!r} is a name of the torch format; a file of safetensors ends in {SAFE_SUFFIX}")
        return False, None
    if os.path.isfile(text):
        raise ValueError(f"{text!r} is a file; OUTPUT is a folder, or a name that ends in .bin or {SAFE_SUFFIX}")
    return bool(safe), bytes_of(max_shard_size)


def main(arguments: list[str] | None = None) -> int:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description="The whole weights of a zoo checkpoint in fp32.")
    parser.add_argument("checkpoint_dir", help="the folder that holds the checkpoints and the file latest")
    parser.add_argument("output", help="a .bin, .pt, .pth or .safetensors file, or a folder")
    parser.add_argument("-t", "--tag", help="which checkpoint; that which latest names if not given")
    parser.add_argument("--max_shard_size", default="5GB", help="of each file in a folder")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors, not the format of torch.save")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("--no_verify", action="store_true", help="do not compare what is read with its checksums")
    parser.add_argument("-d", "--debug", action="store_true", help="say what is read, and show tracebacks")
    given = parser.parse_args(arguments)
    try:
        safe, shard_bytes = place_of(given.output, given.safe_serialization or None, given.max_shard_size)
        source = Checkpoint(given.checkpoint_dir, given.tag, verify=not given.no_verify)
        tensors = tensors_of(source, exclude_frozen_parameters=given.exclude_frozen_parameters)
        for name, tensor in tensors.items() if given.debug else ():
            sys.stderr.write(f"{name}  {tuple(tensor.shape)}  {tensor.dtype}\n")
        for path in write_model(tensors, given.output, safe=safe, max_shard_bytes=shard_bytes):
            sys.stdout.write(f"{path}\n")
    except (ValueError, OSError) as error:
        if given.debug:
            raise
        sys.stderr.write(f"zero_to_fp32: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
