"""What one key of a configuration does: :func:`explain_key`, from the same rows as the pages of the reference."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from zoo.config.page import FATES, Row, place, rows
from zoo.registry import DEFAULT, Registry

__all__ = ["explain_key"]


def explain_key(key: str, registry: Registry = DEFAULT) -> str:
    """The type, default, fate and sentence of a key, by its whole path or by its last name; of a section all its keys.

    Raises:
        ValueError: there is no such key; the sentence has the nearest ones.
    """
    tables = rows(registry)
    found = [(title, row) for title, row in _all(tables) if key == row.path]
    found = found or [(title, row) for title, row in _all(tables) if _named(row, key)]
    below = tables.get(key, [])
    if not found and not below:
        raise ValueError(f"no key is named {key!r}; {_near(key, tables)}")
    parts = [_text(title, row) for title, row in found]
    if below:
        width = max(len(row.path) for row in below)
        lines = [f"  {row.path:<{width}}  {row.default or row.type}" for row in below]
        parts.append("\n".join([f"keys of {key}, with their defaults:", *lines]))
    return "\n\n".join(parts)


def _all(tables: dict[str, list[Row]]) -> Iterator[tuple[str, Row]]:
    return ((title, row) for title, found in tables.items() for row in found)


def _named(row: Row, key: str) -> bool:
    """Whether ``key`` is how the path ends, or is so under another spelling."""
    before = row.path.rpartition(".")[0]
    others = [f"{before}.{alias}".lstrip(".") for alias in row.aliases]
    return any(path == key or path.endswith(f".{key}") for path in (row.path, *others))


def _text(title: str, row: Row) -> str:
    head = f"{row.path}  ({title})" if title.startswith(("optimizer ", "scheduler ")) else row.path
    lines = [
        head,
        f"  {row.type.replace('`', '')}{f', default {row.default}' if row.default else ''}",
        f"  {row.sentence}" if row.sentence else "",
        f"  {row.fate}: {FATES[row.fate]}",
        f"  also written: {', '.join(row.aliases)}" if row.aliases else "",
        f"  all of its section: docs/reference/{place(title)}",
    ]
    return "\n".join(line for line in lines if line)


def _near(key: str, tables: dict[str, list[Row]]) -> str:
    paths = {row.path for _, row in _all(tables)}
    by_name: dict[str, list[str]] = {}
    for path in sorted(paths):
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    near = difflib.get_close_matches(key, paths, 3, 0.7)
    if len(key) >= 4:  # a part of a name, such as "prefetch"
        near += [path for name, found in by_name.items() if key in name for path in found][:6]
    for name in difflib.get_close_matches(key.rpartition(".")[2], by_name, 3, 0.7):
        near += by_name[name][:3]
    if not near:
        return "docs/reference/configuration.md has all of them."
    return f"near names are {', '.join(dict.fromkeys(near))}."
