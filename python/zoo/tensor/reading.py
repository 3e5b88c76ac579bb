"""Values of JSON as fields of a dataclass: what is not of a field's type is told, never taken for something else."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

_WORDS = {bool: "true or false", int: "an integer", str: "a text", float: "a number", type(None): "null"}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def mapping(what: str, data: Any) -> dict[str, Any]:
    """A copy of ``data``.

    Raises:
        ValueError: it is no mapping with texts as keys; ``what`` it should say.
    """
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise ValueError(f"{what} is {data!r}; it takes a mapping.")
    return dict(data)


def listed(what: str, data: Any) -> list[Any]:
    """The items of a list or a tuple.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(data, (list, tuple)):
        raise ValueError(f"{what} is {data!r}; it takes a list.")
    return list(data)


def check(kind: type, given: Mapping[str, Any], *, what: str, free: Iterable[str] = ()) -> None:
    """Compare values with the annotations of a dataclass.

    Args:
        given: by field, all of which ``kind`` has. what: that they are, in errors. free: fields that check themselves.

    Raises:
        ValueError: a value of another type, or a field without one and without a default.
    """
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in missing if name not in given]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}.")
    for name, value in given.items():
        hint = _hints(kind)[name]
        if name not in free and not _fits(value, hint):
            raise ValueError(f"{what} has {name}={value!r}; it takes {_said(hint)}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in args)
    if origin is tuple and args[-1] is not Ellipsis:
        return isinstance(value, tuple) and len(value) == len(args) and all(map(_fits, value, args))
    if origin in (tuple, list, Sequence):
        return isinstance(value, (list, tuple)) and all(_fits(each, args[0]) for each in value)
    return type(value) is hint if hint in (bool, int, str) else isinstance(value, hint)


def _said(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_said, args))
    if origin is tuple and args[-1] is not Ellipsis:
        return f"[{', '.join(map(_said, args))}]"
    if origin in (tuple, list, Sequence):
        return f"a list, each item {_said(args[0])}"
    return _WORDS.get(hint) or hint.__name__
