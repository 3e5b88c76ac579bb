"""Python values as JSON that comes back exactly: the same types and the same values, or a refusal when it is written.

JSON has numbers, strings, lists and objects with strings as keys. What it has not is written as an object with the one
key ``"__zoo__"``: ``{"__zoo__": [kind, parts]}``. An ordinary dict that has this key itself is written in that way too.

=============================================  ==================================================================
None, bool, int, float (NaN too), str, list    as they are
dict with strings as keys                      as an object
dict with other keys, OrderedDict, Counter     its pairs, in order
tuple, set, frozenset, deque                   its items (a deque also its ``maxlen``)
complex, bytes                                 two numbers; base 64
numpy scalars and arrays, dense tensors        dtype, shape, bytes in base 64; a tensor comes back on the CPU
=============================================  ==================================================================

Everything else is refused, subclasses of these types included: they would come back as something else. Two places that
hold one object come back as two equal objects.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from zoo.checkpointing.errors import CheckpointError

_MARK = "__zoo__"
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, deque, dict, OrderedDict, Counter, "
    "numpy scalars and arrays, and dense tensors"
)


def dumps(value: Any, what: str, *, indent: int | None = None) -> str:
    """JSON text from which :func:`decode` makes ``value`` again; ``what`` names it in errors.

    Raises:
        CheckpointError: names the place in ``value`` that cannot be held, and what is there.
    """
    try:
        return json.dumps(encode(value, what), indent=indent, allow_nan=True)
    except RecursionError:
        raise CheckpointError(f"{what} contains itself, or is nested too deeply to be written") from None
    except CheckpointError:
        raise
    except ValueError as error:  # an int of more digits than Python converts
        raise CheckpointError(f"{what} cannot be written: {error}") from None


def encode(value: Any, path: str) -> Any:
    """What JSON can hold of ``value``, which is found at ``path``."""
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return value
    if kind is str:
        return _text(value, path)
    if kind is list:
        return [encode(item, f"{path}[{k}]") for k, item in enumerate(value)]
    if kind in _MAPPINGS:
        return _mapping(value, path)
    if kind in _SEQUENCES:
        return _marked(_SEQUENCES[kind], _items(value, path))
    if kind is deque:
        return _marked("deque", [value.maxlen, _items(value, path)])
    if kind is complex:
        return _marked("complex", [value.real, value.imag])
    if kind is bytes:
        return _marked("bytes", base64.b64encode(value).decode())
    if kind is torch.Tensor or kind is np.ndarray or isinstance(value, np.generic):
        return _array(value, path)
    raise CheckpointError(
        f"{path} is {_described(value)}, which a checkpoint cannot give back exactly; it holds {_ALLOWED}. Give it as "
        "one of these."
    )


def decode(value: Any) -> Any:
    """The value that :func:`encode` was given.

    Raises:
        ValueError: a mark that is not one of its own.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: decode(item) for key, item in value.items()}
    kind, parts = value[_MARK]
    if kind not in _READERS:
        raise ValueError(f"a value of the kind {kind!r} is not known; a newer zoo may have written it")
    return _READERS[kind](parts)


def _marked(kind: str, parts: Any) -> dict[str, Any]:
    return {_MARK: [kind, parts]}


def _text(value: str, path: str) -> str:
    # json joins the two halves of a pair of surrogates; nothing sensible has one half of such a pair.
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise CheckpointError(f"{path} is the string {value!r}, which has half of a character; it cannot be written")
    return value


def _items(values: Iterable[Any], path: str) -> list[Any]:
    return [encode(item, f"{path}[{k}]") for k, item in enumerate(values)]


def _mapping(value: dict[Any, Any], path: str) -> dict[str, Any]:
    kind = type(value)
    if kind is dict and _MARK not in value and all(type(key) is str for key in value):
        return {_text(key, path): encode(item, f"{path}.{key}") for key, item in value.items()}
    pairs = [[encode(key, f"a key of {path}"), encode(item, f"{path}[{key!r}]")] for key, item in value.items()]
    return _marked(_MAPPINGS[kind], pairs)


def _array(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise CheckpointError(f"{path} is {_described(value)}, not dense or without data; give a dense tensor")
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes()
        kind, dtype = "tensor", str(value.dtype).removeprefix("torch.")
    else:
        if value.dtype.hasobject or value.dtype.names is not None:
            raise CheckpointError(f"{path} is {_described(value)} and holds {value.dtype}; give one of numbers")
        kind, dtype = ("array" if isinstance(value, np.ndarray) else "scalar"), value.dtype.str
        raw = np.asarray(value).tobytes()
    return _marked(kind, [dtype, list(value.shape), base64.b64encode(raw).decode()])


def _described(value: Any) -> str:
    kind = type(value)
    return f"of the type {'' if kind.__module__ == 'builtins' else kind.__module__ + '.'}{kind.__qualname__}"


def _tensor(parts: list[Any]) -> torch.Tensor:
    name, shape, raw = parts
    dtype = dtype_named(name)
    content = bytearray(base64.b64decode(raw))
    flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return flat.clone().view(dtype).view(shape)


def _numpy(parts: list[Any]) -> Any:
    name, shape, raw = parts
    return np.frombuffer(base64.b64decode(raw), dtype=np.dtype(name)).reshape(shape).copy()


def dtype_named(name: object) -> torch.dtype:
    """torch's dtype of that name.

    Raises:
        ValueError: there is none.
    """
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__}")
    return found


def _pairs(parts: list[Any]) -> list[tuple[Any, Any]]:
    return [(decode(key), decode(item)) for key, item in parts]


_READERS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda parts: dict(_pairs(parts)),
    "OrderedDict": lambda parts: OrderedDict(_pairs(parts)),
    "Counter": lambda parts: Counter(dict(_pairs(parts))),
    "tuple": lambda parts: tuple(decode(parts)),
    "set": lambda parts: set(decode(parts)),
    "frozenset": lambda parts: frozenset(decode(parts)),
    "deque": lambda parts: deque(decode(parts[1]), maxlen=parts[0]),
    "complex": lambda parts: complex(*parts),
    "bytes": base64.b64decode,
    "scalar": lambda parts: _numpy(parts)[()],
    "array": _numpy,
    "tensor": _tensor,
}
