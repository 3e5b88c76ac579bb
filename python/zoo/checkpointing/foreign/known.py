"""The classes and functions that checkpoints name, and this package's own stand-ins for them.

Nothing here looks anything up by a name from a file: a name is a key of :data:`KNOWN` or :data:`STAND_INS`, or unknown.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.records import Named, Record
from zoo.checkpointing.foreign.regions import MAX_DIMS, Region, StoredTensor, is_size

_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
    "uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip
_DEVICE = re.compile(r"(cpu|cuda|xpu|npu|hpu|mps|meta|mtia|xla|musa)(:\d{1,3})?")
_NUMPY = re.compile(r"[<>=|]?[biufc](1|2|4|8|16)|bool|b1|[SU]\d{1,4}")


RECORD_COST = 3
"""Bytes that a pickle takes at least to make an object: the class, its arguments, the instruction, the memo."""


class StorageKind:
    """A class of storages, as a persistent id names it: what its elements are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class Storage:
    """A storage that a persistent id stands for: bytes of a file, and what its elements are."""

    def __init__(self, data: Region, dtype: torch.dtype) -> None:
        self.data, self.dtype = data, dtype


class SimpleKey:
    """Which values may be keys of dicts and members of sets: those that are hashed in no time and no depth."""

    _PLAIN = (str, int, float, bool, bytes, type(None), complex, torch.dtype, torch.device)

    @staticmethod
    def check(value: Any, left: list[int], depth: int) -> bool:
        """Whether ``value`` is one; ``left[0]`` values may still be looked at."""
        left[0] -= 1
        if left[0] < 0 or depth > 4:
            return False
        if type(value) in SimpleKey._PLAIN or isinstance(value, (Record, Named, torch.Size)):
            # Each not-a-number is another key, and large integers may all have one hash.
            return not (type(value) is float and math.isnan(value)) and not (type(value) is int and abs(value) >= 2**60)
        if type(value) is tuple:
            return len(value) <= left[0] and all(SimpleKey.check(item, left, depth + 1) for item in value)
        return False


class Values:
    """Makes the values of one pickle; counts what it copies, so that all copies are no longer than the pickle."""

    def __init__(self, budget: int, what: str) -> None:
        self._left, self.what = budget, what

    def charge(self, count: int) -> None:
        """Take ``count`` from the budget.

        Raises:
            CheckpointError: more would be copied than the pickle has bytes.
        """
        self._left -= count
        if self._left < 0:
            raise CheckpointError(f"{self.what} would make copies of its parts that are longer than itself")

    def check(self, right: bool, function: Named, args: tuple[Any, ...]) -> None:
        """Raise CheckpointError unless the arguments are ``right``."""
        if not right:
            kinds = ", ".join(type(arg).__name__ for arg in args[:8])
            raise CheckpointError(f"{self.what} calls {function} with ({kinds}), which does not fit")

    def build(self, target: Record, state: Any) -> None:
        """What BUILD gives a record."""
        if target.kind == "numpy.ndarray":
            _fill_array(self, target, state)
        elif target.kind == "numpy.dtype":
            _fill_dtype(self, target, state)
        else:
            target.state = state


_Maker = Callable[[Values, Named, tuple[Any, ...]], Any]


def _record(values: Values, function: Named, args: tuple[Any, ...]) -> Record:
    values.charge(len(args) + RECORD_COST)
    return Record(str(function), args, known=True)


# -- tensors ----------------------------------------------------------------------------------------------------------


def _tensor(values: Values, function: Named, args: tuple[Any, ...]) -> StoredTensor:
    """(storage, offset, size, stride, requires_grad, hooks, …) of torch's ``_rebuild_tensor_v2``."""
    values.check(len(args) >= 4 and isinstance(args[0], Storage), function, args)
    return _stored(values, function, args, args[0].dtype, args[6:7])


def _tensor_v3(values: Values, function: Named, args: tuple[Any, ...]) -> StoredTensor:
    """(storage, offset, size, stride, requires_grad, hooks, dtype, …): for dtypes without storages of their own."""
    right = len(args) >= 7 and isinstance(args[0], Storage) and isinstance(args[6], torch.dtype)
    values.check(right, function, args)
    return _stored(values, function, args, args[6], args[7:8])


def _stored(
    values: Values, function: Named, args: tuple[Any, ...], dtype: torch.dtype, said: tuple[Any, ...]
) -> StoredTensor:
    """``said``: what torch says of a tensor beside its place, where it says something: that it is the conjugate or the
    negative of what is stored."""
    signs = said[0] if said and said[0] is not None else {}
    values.check(isinstance(signs, dict), function, args)
    conjugate, negative = signs.get("conj") is True, signs.get("neg") is True
    fits = (dtype.is_complex or not conjugate) and (dtype.is_complex or dtype.is_floating_point or not negative)
    values.check(fits, function, args)
    return StoredTensor.checked(args[0].data, dtype, *args[1:4], conjugate=conjugate, negative=negative)


def _parameter(values: Values, function: Named, args: tuple[Any, ...]) -> Any:
    values.check(len(args) >= 1 and isinstance(args[0], (StoredTensor, Record)), function, args)
    return args[0]


def _subclass(values: Values, function: Named, args: tuple[Any, ...]) -> Any:
    """(function, type, args, state) of ``_rebuild_from_type_v2``: the tensor without its class."""
    values.check(len(args) == 4 and isinstance(args[0], Named) and isinstance(args[2], tuple), function, args)
    inner = _TENSORS.get((args[0].module, args[0].name))
    return inner(values, args[0], args[2]) if inner is not None else Record(str(args[0]), args[2], known=False)


def _torch_size(values: Values, function: Named, args: tuple[Any, ...]) -> torch.Size:
    sizes = args[0] if len(args) == 1 else None
    right = isinstance(sizes, (tuple, list)) and len(sizes) <= MAX_DIMS and all(map(is_size, sizes))
    values.check(right, function, args)
    return torch.Size(sizes or ())


def _device(values: Values, function: Named, args: tuple[Any, ...]) -> torch.device:
    # Of other machines; that it is no device of this one does not matter.
    text = ":".join(map(str, args)) if len(args) in (1, 2) and all(type(a) in (str, int) for a in args) else ""
    values.check(len(text) < 40 and _DEVICE.fullmatch(text) is not None, function, args)
    try:
        return torch.device(text)
    except RuntimeError:
        return torch.device("cpu")


def _layout(values: Values, function: Named, args: tuple[Any, ...]) -> Any:
    values.check(len(args) == 1 and isinstance(args[0], str), function, args)
    return args[0]


# -- Python and numpy -------------------------------------------------------------------------------------------------


def _ordered(values: Values, function: Named, args: tuple[Any, ...]) -> OrderedDict[Any, Any]:
    values.charge(RECORD_COST)
    if not args:
        return OrderedDict()
    pairs = args[0] if len(args) == 1 else None
    right = isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and SimpleKey.check(pair[0], [64], 0) for pair in pairs
    )
    values.check(right, function, args)
    values.charge(2 * len(pairs or ()))
    return OrderedDict(pairs or ())


def _default(values: Values, function: Named, args: tuple[Any, ...]) -> dict[Any, Any]:
    values.check(len(args) <= 1, function, args)  # the factory is code, and is not kept
    values.charge(RECORD_COST)
    return {}


def _set_of(kind: type[Any]) -> _Maker:
    def make(values: Values, function: Named, args: tuple[Any, ...]) -> Any:
        items = args[0] if len(args) == 1 else ()
        right = isinstance(items, (list, tuple)) and all(SimpleKey.check(item, [64], 0) for item in items)
        values.check(right and len(args) < 2, function, args)
        values.charge(len(items) + RECORD_COST)
        return kind(items)

    return make


def _complex(values: Values, function: Named, args: tuple[Any, ...]) -> complex:
    values.check(len(args) == 2 and all(type(a) is float for a in args), function, args)
    return complex(*args)


def _bytes_of_text(values: Values, function: Named, args: tuple[Any, ...]) -> bytes:
    """``_codecs.encode(text, "latin1")``: how protocol 2 writes bytes."""
    right = len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1")
    values.check(right, function, args)
    values.charge(len(args[0]))
    return bytes(args[0].encode("latin-1"))


def _no_bytes(values: Values, function: Named, args: tuple[Any, ...]) -> bytes:
    values.check(not args, function, args)
    return b""


def _byte_array(values: Values, function: Named, args: tuple[Any, ...]) -> bytes:
    if len(args) == 1 and isinstance(args[0], bytes):
        return args[0]
    return _bytes_of_text(values, function, args) if args else b""


def _enum(values: Values, function: Named, args: tuple[Any, ...]) -> Any:
    """A member of an enumeration is its value."""
    values.check(len(args) == 1 and type(args[0]) in (int, str), function, args)
    return args[0]


def _reconstructor(values: Values, function: Named, args: tuple[Any, ...]) -> Record:
    """``copyreg._reconstructor(class, base, state)``."""
    values.check(len(args) == 3 and isinstance(args[0], Named), function, args)
    known = (args[0].module, args[0].name) in KNOWN
    return Record(str(args[0]), (), known)


def _numpy_dtype(values: Values, function: Named, args: tuple[Any, ...]) -> Record:
    text = args[0] if args else None
    values.check(isinstance(text, str) and _NUMPY.fullmatch(text) is not None, function, args)
    found = Record("numpy.dtype", (), known=True)
    found.state = np.dtype(str(text))
    return found


def _fill_dtype(values: Values, target: Record, state: Any) -> None:
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
    if order not in ("<", ">", "|", "="):
        raise CheckpointError(f"{values.what} has a numpy dtype whose state does not fit")
    if order != "|":
        target.state = target.state.newbyteorder(order)


def _numpy_empty(values: Values, function: Named, args: tuple[Any, ...]) -> Record:
    return Record("numpy.ndarray", (), known=True)


def _fill_array(values: Values, target: Record, state: Any) -> None:
    """(version, shape, dtype, in Fortran's order, bytes)."""
    right = isinstance(state, tuple) and len(state) == 5 and isinstance(state[1], tuple) and len(state[1]) <= 32
    right = right and all(map(is_size, state[1])) and isinstance(state[4], bytes)
    if not right or not _is_dtype(state[2]) or math.prod(state[1]) * state[2].state.itemsize != len(state[4]):
        raise CheckpointError(f"{values.what} has a numpy array whose shape does not fit its bytes")
    values.charge(len(state[4]))
    flat = np.frombuffer(state[4], dtype=state[2].state) if state[4] else np.zeros(0, state[2].state)
    target.kind, target.state = "numpy", flat.reshape(state[1], order="F" if state[3] is True else "C").copy()


def _numpy_scalar(values: Values, function: Named, args: tuple[Any, ...]) -> Record:
    right = len(args) == 2 and _is_dtype(args[0]) and isinstance(args[1], bytes)
    values.check(right and len(args[1]) == args[0].state.itemsize > 0, function, args)
    found = Record("numpy", (), known=True)
    found.state = np.frombuffer(args[1], dtype=args[0].state)[0]
    return found


def _is_dtype(value: Any) -> bool:
    return isinstance(value, Record) and value.kind == "numpy.dtype" and isinstance(value.state, np.dtype)


_TENSORS: dict[tuple[str, str], _Maker] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}

_RECORDS = [
    "argparse.Namespace",
    "types.SimpleNamespace",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.utils.tensor_fragment.tensor_fragment",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta",
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.planner._StorageInfo",
]  # fmt: skip

KNOWN: dict[tuple[str, str], _Maker] = {
    **_TENSORS,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    ("torch.nn.parameter", "Parameter"): _record,
    ("torch", "Tensor"): _record,
    ("torch", "Size"): _torch_size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _enum,
    ("collections", "OrderedDict"): _ordered,
    ("collections", "defaultdict"): _default,
    ("_codecs", "encode"): _bytes_of_text,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("copy_reg", "_reconstructor"): _reconstructor,
    ("numpy", "dtype"): _numpy_dtype,
    ("numpy", "ndarray"): _record,
    **{
        (f"{package}.multiarray", name): maker
        for package in ("numpy.core", "numpy._core")
        for name, maker in (("_reconstruct", _numpy_empty), ("scalar", _numpy_scalar))
    },
    **{
        (module, name): maker
        for module in ("builtins", "__builtin__")
        for name, maker in (
            ("set", _set_of(set)), ("frozenset", _set_of(frozenset)), ("complex", _complex), ("bytes", _no_bytes),
            ("bytearray", _byte_array), ("object", _record), ("dict", _default), ("list", _record), ("tuple", _record),
            ("int", _record), ("float", _record), ("str", _record),
        )
    },
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _enum,
    **{(path.rpartition(".")[0], path.rpartition(".")[2]): _record for path in _RECORDS},
}  # fmt: skip
"""(module, name) → what is made when a pickle calls it."""

STAND_INS: dict[tuple[str, str], Any] = {
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
    **{("torch", name): StorageKind(dtype) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): StorageKind(torch.uint8),
}
"""(module, name) → what a pickle means by the name alone."""
