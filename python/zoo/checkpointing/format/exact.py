"""Python values as JSON that comes back exactly: the same types and the same values, or a refusal when it is written.

This is how a checkpoint holds the state of schedules, loaders, parts of the engine and its user. JSON has numbers,
strings, lists and objects with strings as keys. What it has not is written as an object with the one key ``"__zoo__"``:
``{"__zoo__": [kind, parts]}``. An ordinary dict that has this key itself is written in that way too.

===============================================  ================================================================
None, bool, int, float, str, list                as they are
NaN and infinite floats, which JSON has not      their names
int of more than 2000 bits                       in base 16
str with half of a pair of surrogates            its UTF-8 in base 64, that half included
dict with strings as keys                        as an object
dict with other keys, OrderedDict, Counter       its pairs, in order
defaultdict                                      its pairs; the name of its factory, a builtin type
``argparse.Namespace``, ``SimpleNamespace``      its attributes
``pathlib.Path``                                 its text; it comes back as the path of the system that reads
datetime, date, time, timedelta                  ISO 8601; a timedelta its days, seconds and microseconds
tuple, set, frozenset, deque, ``torch.Size``     its items (a deque also its ``maxlen``)
complex, bytes                                   two numbers; base 64
numpy scalars and arrays, dense tensors          dtype, shape, bytes in base 64; a tensor comes back on the CPU
``torch.dtype``, ``torch.device``                its name
===============================================  ================================================================

Everything else is refused, subclasses of these types included: they would come back as something else. Two places that
hold one object come back as two equal objects, and a tensor comes back without its place in autograd.

Reading builds these kinds and nothing else: what a file says is never imported or called, and the shape, dtype and
bytes of an array must fit each other. A kind that is not known is an error, so new kinds need no new version of the
format.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.format import exact_objects as objects

MARK = "__zoo__"
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "Size"}
_MAPPINGS: dict[type, str] = {
    dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter", defaultdict: "defaultdict"
}  # fmt: skip
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, int, float, str, list, dict, set)
}  # fmt: skip
_MANY_BITS = 2000  # Python converts at least 640 digits, whatever its limit is set to
_NUMPY = re.compile(r"[<>|=][biufcmMSUV]\d{1,9}(\[\d{0,9}[A-Za-z]{1,2}\])?")
_MANY_EQUAL = 1000
_NESTED = (list, dict)
_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,4})?")
_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+")
_ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, deque, dict, OrderedDict, Counter, "
    "defaultdict of a builtin type, argparse.Namespace, SimpleNamespace, Path, datetime, date, time, timedelta, numpy "
    "scalars and arrays, dense tensors, torch.Size, torch.dtype and torch.device"
)


# -- writing ----------------------------------------------------------------------------------------------------------


def dumps(value: Any, what: str, *, indent: int | None = None) -> str:
    """JSON text from which :func:`decode` makes ``value`` again; ``what`` names it in errors.

    Raises:
        CheckpointError: names the place in ``value`` that cannot be held, and what is there.
    """
    try:
        return json.dumps(encode(value, what), indent=indent, allow_nan=False)
    except RecursionError:
        raise CheckpointError(f"{what} contains itself, or is nested too deeply to be written") from None


def encode(value: Any, path: str) -> Any:
    """What JSON can hold of ``value``, which is found at ``path``."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is float:
        return value if math.isfinite(value) else _marked("float", repr(value))
    if kind is int:
        return value if value.bit_length() <= _MANY_BITS else _marked("int", hex(value))
    if kind is str:
        return value if _is_text(value) else _marked("str", _base64(value.encode("utf-8", "surrogatepass")))
    if kind is list:
        return [encode(item, f"{path}[{k}]") for k, item in enumerate(value)]
    if kind is defaultdict and value.default_factory is not None:
        return _defaultdict(value, path)
    if kind in _MAPPINGS:
        return _mapping(value, path)
    if kind in _SEQUENCES:
        return _marked(_SEQUENCES[kind], _items(value, path))
    if kind is deque:
        return _marked("deque", [value.maxlen, _items(value, path)])
    if kind is complex:
        return _marked("complex", [encode(value.real, path), encode(value.imag, path)])
    if kind is bytes:
        return _marked("bytes", _base64(value))
    if kind is torch.Tensor or kind is np.ndarray or isinstance(value, np.generic):
        return _array(value, path)
    if kind is torch.dtype:
        return _marked("dtype", _name(value))
    if kind is torch.device:
        return _marked("device", str(value))
    marked = objects.encoded(value)
    if marked is not None:
        name, parts = marked
        return _marked(name, _mapping(parts, path) if isinstance(parts, dict) else parts)
    raise CheckpointError(
        f"{path} is {_described(value)}, which a checkpoint cannot give back exactly; it holds {_ALLOWED}. Give it as "
        "one of these."
    )


def _marked(kind: str, parts: Any) -> dict[str, Any]:
    return {MARK: [kind, parts]}


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _is_text(value: str) -> bool:
    # json joins two halves of a pair of surrogates, which are one character then and not two.
    return not any("\ud800" <= c <= "\udfff" for c in value)


def _items(values: Iterable[Any], path: str) -> list[Any]:
    return [encode(item, f"{path}[{k}]") for k, item in enumerate(values)]


def _mapping(value: dict[Any, Any], path: str) -> dict[str, Any]:
    kind = type(value)
    if kind is dict and MARK not in value and all(type(key) is str and _is_text(key) for key in value):
        return {key: encode(item, f"{path}.{key}") for key, item in value.items()}
    return _marked(_MAPPINGS[kind], _pairs_of(value, path))


def _pairs_of(value: Mapping[Any, Any], path: str) -> list[Any]:
    return [[encode(key, f"a key of {path}"), encode(item, f"{path}[{_short(key)}]")] for key, item in value.items()]


def _defaultdict(value: defaultdict[Any, Any], path: str) -> dict[str, Any]:
    name = next((name for name, kind in _FACTORIES.items() if kind is value.default_factory), None)
    if name is None:
        raise CheckpointError(
            f"{path} is a defaultdict with a factory that is code; it may be one of {', '.join(_FACTORIES)}, or none. "
            "Give it as a dict."
        )
    return _marked("defaultdict of", [name, _marked("dict", _pairs_of(value, path))])


def _array(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise CheckpointError(f"{path} is {_described(value)}, not dense or without data; give a dense tensor")
        flat = value.detach().cpu().resolve_conj().resolve_neg()
        try:
            flat = flat.contiguous().reshape(-1)
        except NotImplementedError:  # types that torch cannot copy element by element
            raise CheckpointError(
                f"{path} is a tensor of {value.dtype} with strides {value.stride()}, which torch cannot copy; give one "
                "that is contiguous"
            ) from None
        raw = flat.view(torch.uint8).numpy().tobytes()
        kind, dtype = "tensor", _name(value.dtype)
    else:
        _check_numpy(value, path)
        kind, dtype = ("array" if isinstance(value, np.ndarray) else "scalar"), value.dtype.str
        raw = value.tobytes() if value.dtype.itemsize else b""  # of an empty string numpy gives four
    return _marked(kind, [dtype, list(value.shape), _base64(raw)])


def _check_numpy(value: Any, path: str) -> None:
    dtype = value.dtype
    # A dtype that another package has added to numpy has the letters of a plain one.
    known = not dtype.hasobject and dtype.names is None and np.dtype(dtype.str) == dtype
    if not known or (isinstance(value, np.ndarray) and dtype.itemsize == 0):
        raise CheckpointError(f"{path} is {_described(value)} and holds {dtype}; give one of numbers")
    if dtype.kind in "SU" and isinstance(value, np.generic) and np.asarray(value)[()] != value:
        raise CheckpointError(f"{path} is {value!r}, whose last zeros numpy drops from arrays; give it as {dtype.type}")


def _described(value: Any) -> str:
    kind = type(value)
    return f"of the type {'' if kind.__module__ == 'builtins' else kind.__module__ + '.'}{kind.__qualname__}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- reading ----------------------------------------------------------------------------------------------------------


def decode(value: Any, path: str = "it") -> Any:
    """The value that :func:`encode` was given; ``path`` names it in errors.

    Raises:
        ValueError: a mark that is not one of its own, or parts that do not fit its kind.
    """
    return _decode(value, _Place(path))


@dataclass(frozen=True)
class _Place:
    """Where a value is. Its words are put together when they are asked for: they are as long as what is decoded."""

    step: str | int
    above: _Place | None = None

    def __str__(self) -> str:
        steps: list[str] = []
        place: _Place | None = self
        while place is not None:
            step = place.step if isinstance(place.step, int) else _cut(place.step)
            steps.append(str(step) if place.above is None else f"[{step}]" if isinstance(step, int) else f".{step}")
            place = place.above
        return "".join(reversed(steps))


def _cut(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _decode(value: Any, place: _Place) -> Any:
    if isinstance(value, list):
        return [_decode(item, _Place(k, place)) if isinstance(item, _NESTED) else item for k, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {
            key: _decode(item, _Place(key, place)) if isinstance(item, _NESTED) else item for key, item in value.items()
        }
    mark = value[MARK]
    if len(value) != 1 or not isinstance(mark, list) or len(mark) != 2:
        raise ValueError(f"{place} is marked as {_short(value)}; a mark is {{{MARK!r}: [kind, parts]}}")
    kind, parts = mark
    if not isinstance(kind, str) or kind not in _READERS:
        raise ValueError(f"{place}: a value of the kind {_short(kind)} is not known; a newer zoo may have written it")
    try:
        return _READERS[kind](parts, place)
    except _Unfit as error:
        raise ValueError(f"{place} is said to be a {kind}, and {error}") from None


class _Unfit(Exception):
    """What parts have that those of their kind cannot have."""


def dtype_named(name: object) -> torch.dtype:
    """torch's dtype of that name.

    Raises:
        ValueError: there is none.
    """
    # Not by getattr(): torch imports some of its modules when they are asked for by name.
    found = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__}")
    return found


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python converts
        text = f"something of the type {type(value).__qualname__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _list(parts: Any, place: _Place) -> list[Any]:
    if not isinstance(parts, list):
        raise _Unfit(f"its items are {_short(parts)}, not a list")
    found: list[Any] = _decode(parts, place)
    return found


def _hashed(kind: Callable[[list[Any]], Any], items: list[Any], keys: list[Any]) -> Any:
    """Of items that have their places by the hashes of ``keys``: many equal ones would take a time that grows with the
    square of their number."""
    try:
        equal = Counter(map(hash, keys)).most_common(1)
        if equal and equal[0][1] > _MANY_EQUAL:
            raise _Unfit(f"{equal[0][1]} of its items have one hash; at most {_MANY_EQUAL} may")
        return kind(items)
    except TypeError as error:
        raise _Unfit(f"one of its items cannot be: {error}") from None


def _set(kind: Callable[[list[Any]], Any], parts: Any, place: _Place) -> Any:
    items = _list(parts, place)
    return _hashed(kind, items, items)


def _pairs(parts: Any, place: _Place) -> Any:
    pairs = _list(parts, place)
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise _Unfit("its items are not all pairs of a key and a value")
    return _hashed(dict, pairs, [pair[0] for pair in pairs])


def _with_factory(parts: Any, place: _Place) -> defaultdict[Any, Any]:
    if not isinstance(parts, list) or len(parts) != 2 or parts[0] not in _FACTORIES:
        raise _Unfit(f"its parts are {_short(parts)}, not the name of a factory and a dict")
    found = _decode(parts[1], place)
    if type(found) is not dict:
        raise _Unfit("its second part is no dict")
    return defaultdict(_FACTORIES[parts[0]], found)


def _object(kind: str) -> Callable[[Any, _Place], Any]:
    def read(parts: Any, place: _Place) -> Any:
        try:
            return objects.decoded(kind, _decode(parts, place))
        except (TypeError, ValueError, OverflowError) as error:
            raise _Unfit(f"its parts are {_short(parts)}: {error}") from None

    return read


def _deque(parts: Any, place: _Place) -> deque[Any]:
    if not isinstance(parts, list) or len(parts) != 2 or not (parts[0] is None or _is_size(parts[0])):
        raise _Unfit(f"its parts are {_short(parts)}, not its maxlen and a list")
    return deque(_list(parts[1], place), maxlen=parts[0])


def _complex(parts: Any, place: _Place) -> complex:
    found = _list(parts, place)
    if [type(part) for part in found] != [float, float]:
        raise _Unfit(f"its parts are {_short(parts)}, not two floats")
    return complex(*found)


def _float(parts: Any, place: _Place) -> float:
    if parts not in ("nan", "inf", "-inf"):
        raise _Unfit(f"{_short(parts)} is none of nan, inf and -inf")
    return float(parts)


def _int(parts: Any, place: _Place) -> int:
    if not isinstance(parts, str) or not _HEXADECIMAL.fullmatch(parts):
        raise _Unfit(f"{_short(parts)} is no number in base 16")
    return int(parts, 16)


def _bytes(parts: Any, place: _Place) -> bytes:
    try:
        return base64.b64decode(parts, validate=True)
    except (TypeError, ValueError):
        raise _Unfit(f"{_short(parts)} is not base 64") from None


def _str(parts: Any, place: _Place) -> str:
    try:
        return _bytes(parts, place).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise _Unfit(f"its bytes are not UTF-8: {error}") from None


def _size(parts: Any, place: _Place) -> torch.Size:
    if not isinstance(parts, list) or not all(_is_size(d) for d in parts):
        raise _Unfit(f"its items are {_short(parts)}, not a list of sizes")
    return torch.Size(parts)


def _dtype(parts: Any, place: _Place) -> torch.dtype:
    try:
        return dtype_named(parts)
    except ValueError as error:
        raise _Unfit(str(error)) from None


def _device(parts: Any, place: _Place) -> torch.device:
    try:
        if isinstance(parts, str) and _DEVICE.fullmatch(parts):
            return torch.device(parts)
    except RuntimeError:
        pass
    raise _Unfit(f"{_short(parts)} is no device of torch {torch.__version__}")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _content(parts: Any, place: _Place) -> tuple[Any, list[int], bytes]:
    """Name of the dtype, shape, and bytes."""
    if not isinstance(parts, list) or len(parts) != 3:
        raise _Unfit(f"its parts are {_short(parts)}, not dtype, shape and bytes")
    return parts[0], list(_size(parts[1], place)), _bytes(parts[2], place)


def _check_bytes(shape: list[int], itemsize: int, name: str, raw: bytes) -> None:
    needed = math.prod(shape) * itemsize
    if needed != len(raw):
        raise _Unfit(f"has {len(raw)} bytes; {shape} of {name} has {needed}")


def _tensor(parts: Any, place: _Place) -> torch.Tensor:
    name, shape, raw = _content(parts, place)
    dtype = _dtype(name, place)
    _check_bytes(shape, dtype.itemsize, name, raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    try:
        return flat.clone().view(dtype).view(shape)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise _Unfit(f"torch makes no such tensor: {error}") from None


def _numpy(parts: Any, place: _Place) -> Any:
    name, shape, raw = _content(parts, place)
    if not isinstance(name, str) or not _NUMPY.fullmatch(name):
        raise _Unfit(f"{_short(name)} is no dtype of numbers")
    try:
        dtype = np.dtype(name)
        if shape and not dtype.itemsize:  # numpy would make elements of some bytes of it
            raise _Unfit(f"{name} has no bytes; a scalar may have it, and no array")
        _check_bytes(shape, dtype.itemsize, name, raw)
        return np.ndarray(shape, dtype, buffer=raw).copy() if raw else np.zeros(shape, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise _Unfit(f"numpy makes no such array: {error}") from None


def _scalar(parts: Any, place: _Place) -> Any:
    found = _numpy(parts, place)
    if found.shape:
        raise _Unfit(f"its shape is {found.shape}, not ()")
    return found[()]


_READERS: dict[str, Callable[[Any, _Place], Any]] = {
    "dict": _pairs,
    "OrderedDict": lambda parts, place: OrderedDict(_pairs(parts, place)),
    "Counter": lambda parts, place: Counter(_pairs(parts, place)),
    "defaultdict": lambda parts, place: defaultdict(None, _pairs(parts, place)),
    "tuple": lambda parts, place: tuple(_list(parts, place)),
    "set": lambda parts, place: _set(set, parts, place),
    "frozenset": lambda parts, place: _set(frozenset, parts, place),
    "defaultdict of": _with_factory,
    **{kind: _object(kind) for kind in objects.KINDS},
    "deque": _deque,
    "complex": _complex,
    "float": _float,
    "int": _int,
    "bytes": _bytes,
    "str": _str,
    "Size": _size,
    "dtype": _dtype,
    "device": _device,
    "scalar": _scalar,
    "array": _numpy,
    "tensor": _tensor,
}
