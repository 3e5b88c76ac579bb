"""Which cases of a test with many of them are left to ``make test-slow``.

A test marked ``matrix`` has one body and many cases (stages x dtypes x devices). ``make test`` runs a third of those
that are not slow anyway, at least one: whose names have the smallest checksums, so that it is the same third each time
and no row or column.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest


def rest(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases that are not of the third."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix") and not any(map(item.get_closest_marker, ("slow", "campaign"))):
            cases[item.nodeid.partition("[")[0]].append(item)
    found = []
    for mine in cases.values():
        mine.sort(key=lambda item: zlib.crc32(item.name.encode()))
        found += mine[-(-len(mine) // 3) :]
    return found
