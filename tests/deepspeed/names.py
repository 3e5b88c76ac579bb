"""The names of DeepSpeed that programs touch (``names.txt``), and whether they are there.

``python -m tests.deepspeed.names`` prints those that are not, and why.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from zoo.deepspeed import FINDER

FILE = Path(__file__).with_suffix(".txt")


class Listed(NamedTuple):
    """A name, beneath ``deepspeed``; in how many programs it occurs."""

    group: int
    weight: int
    path: str


def listed() -> list[Listed]:
    """All of them."""
    rows = [line.split() for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return [Listed(int(g), int(w), name.partition(".")[2]) for g, w, name in rows]


def is_there(path: str, root: str = "zoo.deepspeed") -> bool:
    """Whether a program gets it: a module, or what is in one, or in a class of one."""
    parts = [root, *filter(None, path.split("."))]
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        try:
            for part in parts[length:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


if __name__ == "__main__":
    for one in listed():
        if not is_there(one.path):
            sys.stdout.write(f"{one.group} {one.weight} {one.path}: {FINDER.why(one.path)}\n")
# one.group, one.weight, one.path, "-", FINDER.why(one.path))
