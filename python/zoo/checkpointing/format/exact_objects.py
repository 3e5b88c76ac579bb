"""Objects of the standard library that ``exact.py`` holds: bags of attributes, paths, times."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ISO: dict[str, Any] = {"datetime": datetime, "date": date, "time": time}
_BAGS: dict[str, Callable[..., Any]] = {"Namespace": argparse.Namespace, "SimpleNamespace": SimpleNamespace}
KINDS = (*_BAGS, *_ISO, "timedelta", "Path")


def encoded(value: Any) -> tuple[str, Any] | None:
    """(kind, what JSON can hold of it; a dict of its attributes for a bag), None where it is of no such kind."""
    kind = type(value)
    for name, bag in _BAGS.items():
        if kind is bag:
            return name, dict(vars(value))
    for name, iso in _ISO.items():
        if kind is iso:
            text, fold = value.isoformat(), getattr(value, "fold", 0)
            # Names of time zones are not told, and Python reads some offsets as others.
            return (name, [text, fold]) if repr(_of_iso(name, text, fold)) == repr(value) else None
    if kind is timedelta:
        return "timedelta", [value.days, value.seconds, value.microseconds]
    if kind is type(Path()):
        return "Path", str(value)
    return None


def _of_iso(name: str, text: str, fold: int) -> Any:
    found = _ISO[name].fromisoformat(text)
    return found.replace(fold=fold) if fold else found


def decoded(kind: str, parts: Any) -> Any:
    """The object.

    Raises:
        TypeError, ValueError, OverflowError: the parts are not its.
    """
    if kind in _BAGS:
        if type(parts) is not dict or not all(type(key) is str for key in parts):
            raise TypeError("they are no attributes")
        return _BAGS[kind](**parts)
    if kind in _ISO:
        text, fold = parts
        return _of_iso(kind, text, fold)
    if kind == "timedelta":
        days, seconds, microseconds = parts
        if not all(type(part) is int for part in parts):
            raise TypeError("they are no whole numbers")
        return timedelta(days, seconds, microseconds)
    if type(parts) is not str:
        raise TypeError("it is no text")
    return Path(parts)
