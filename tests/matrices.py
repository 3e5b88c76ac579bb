"""Which tests ``make test`` leaves to ``make test-slow``, so that it stays short however many there are.

A test marked ``matrix`` has one body and many cases (stages x dtypes x devices). ``make test`` runs a third of those
that are not slow anyway, at least one: whose names have the smallest checksums, so that it is the same third each time
and no row or column.

A test marked ``dear`` takes more than about a second of CPU; these are one of fourteen tests, and half of the time of
all. ``make test`` runs a sixth of them, drawn by the files of the commit: one commit always runs the same ones, and
another one others. A run of files that somebody names runs all.
"""

from __future__ import annotations

import subprocess
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ONE_OF = 6


def rest(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases of matrices that are not of the third."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix") and not _is_left_anyway(item):
            cases[item.nodeid.partition("[")[0]].append(item)
    found = []
    for mine in cases.values():
        mine.sort(key=lambda item: zlib.crc32(item.name.encode()))
        found += mine[-(-len(mine) // 3) :]
    return found


def not_drawn(items: Sequence[pytest.Item], files: str) -> list[pytest.Item]:
    """The dear tests whose turn it is not with ``files``."""
    dear = [item for item in items if item.get_closest_marker("dear") and not _is_left_anyway(item)]
    return [item for item in dear if zlib.crc32(f"{files} {item.nodeid}".encode()) % ONE_OF]


def is_whole(args: Sequence[str]) -> bool:
    """Whether a run was asked for all tests and not for some files."""
    return all(Path(arg).resolve() in (TESTS, TESTS.parent) for arg in args)


def files() -> str:
    """The name git has for the files of the checked out commit, whatever commit they are in."""
    return told_by_git("rev-parse", "HEAD^{tree}")


def told_by_git(*command: str) -> str:
    """What a command of git prints; empty where git knows of no commit, such as in an archive of sources."""
    try:
        return subprocess.run(["git", *command], cwd=TESTS, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _is_left_anyway(item: pytest.Item) -> bool:
    return any(map(item.get_closest_marker, ("slow", "campaign")))
