"""Modules by patterns of their names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means a name.

    A pattern is a regular expression that is searched for anywhere in the name: "attention.self", "layer....conv1".
    What is no regular expression ("*", "*.fc1") is a shell pattern for the whole name.
    """
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return fnmatch.fnmatchcase(name, pattern)


def nothing_matches(where: str, pattern: str, names: Iterable[str], why: str = "") -> ValueError:
    """The error for a pattern without a module: its place, and the nearest names."""
    there = sorted(names)
    near = nearest_names(re.sub(r"[\\^$*+?()\[\]{}|]", "", pattern), there)
    known = f"the nearest of {len(there)} names are {', '.join(map(repr, near))}" if near else "it has none"
    return ValueError(
        f"{where}: the pattern {pattern!r} {why or 'matches no module of the model that can be compressed so'}; "
        f"{known}. "
        'A pattern is a regular expression searched for in the name, and "*" is all.'
    )


def nearest_names(name: str, names: Iterable[str], limit: int = 4) -> list[str]:
    """Names of which some run of parts is like ``name``, the nearest first."""

    def likeness(other: str) -> float:
        parts = other.split(".")
        size = name.count(".") + 1
        runs = [".".join(parts[i : i + size]) for i in range(max(1, len(parts) - size + 1))]
        return max(difflib.SequenceMatcher(None, name, run).ratio() for run in runs)

    return sorted(sorted(names), key=likeness, reverse=True)[:limit]
