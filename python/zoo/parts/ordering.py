"""The order in which parts are called."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def in_order(parts: Mapping[str, T]) -> list[tuple[str, T]]:
    """Names and parts, so that all ranks call them alike: what they declare, then by name.

    A part declares names in ``before`` and ``after``, which may be there or not.

    Raises:
        ValueError: the declarations form a circle; the sentence has its names.
    """
    later: dict[str, set[str]] = {name: set() for name in parts}
    for name, part in parts.items():
        for other in _named(part, "before"):
            if other in later and other != name:
                later[name].add(other)
        for other in _named(part, "after"):
            if other in later and other != name:
                later[other].add(name)
    waits = {name: sum(name in others for others in later.values()) for name in parts}
    ready = [name for name, count in waits.items() if not count]
    heapq.heapify(ready)
    found: list[tuple[str, T]] = []
    while ready:
        name = heapq.heappop(ready)
        found.append((name, parts[name]))
        for other in later[name]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, other)
    if len(found) < len(parts):
        circle = ", ".join(sorted(set(parts) - {name for name, _ in found}))
        raise ValueError(
            f"the engine parts {circle} cannot be ordered: by their before= and after= each comes before itself. "
            "Remove one of the declarations."
        )
    return found


def _named(part: object, what: str) -> Iterable[str]:
    given = getattr(part, what, ())
    if isinstance(given, str):
        raise ValueError(f"{type(part).__name__}.{what} = {given!r}; it is a tuple of names of parts: ({given!r},).")
    return tuple(given)
