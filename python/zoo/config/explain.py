"""Every value of a configuration beside where it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

__all__ = ["explain", "rows_of"]


def explain(items: Iterable[tuple[str, Any]], sources: Mapping[str, str], *, given: bool = False) -> str:
    """Lines ``path = value  (source)``; a path without a source has its default value, and is left out if ``given``."""
    found = rows_of(items, lambda path: sources.get(path, "default"))
    if given:
        found = [row for row in found if row[2] != "default"]
    rows = [(f"{path} = {value!r}", source) for path, value, source in found]
    width = min(max((len(text) for text, _ in rows), default=0), 64)
    return "\n".join(f"{text:<{width}}  ({source})" for text, source in rows)


def rows_of(items: Iterable[tuple[str, Any]], source: Callable[[str], str]) -> list[tuple[str, Any, str]]:
    """(path, value, where it came from) of every value."""
    leaves = (leaf for name, item in items for leaf in _leaves(item, name))
    return [(path, value, source(path)) for path, value in leaves]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        items = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, Mapping) and value:
        items = list(value.items())
    else:
        yield path, value
        return
    for name, item in items:
        yield from _leaves(item, f"{path}.{name}")
