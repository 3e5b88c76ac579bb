"""Barriers and exchanges within a warp, as the sources for CUDA have them: where, and with a number each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zoo.kernels.building.plan import SOURCES, source_files

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
BARRIER = "__syncthreads"
PLACE = re.compile(r"\b(__syncthreads|__syncwarp|__(?:shfl|ballot|any|all|match|reduce)\w*_sync)\s*\(")
UNKNOWN = re.compile(
    r"\b(?:__activemask|__shfl|__ballot|__syncthreads_\w+|cooperative_groups|cuda::barrier|bar\.sync)\b"
)
MOST_PLACES = 512


@dataclass(frozen=True)
class Place:
    """One of them in the text of a file: ``name`` is what is called there, in the characters ``begin`` to ``end``."""

    file: str
    line: int
    name: str
    begin: int
    end: int

    @property
    def is_barrier(self) -> bool:
        """Whether it is of the whole block and has no mask."""
        return self.name == BARRIER


def without_comments(text: str) -> str:
    """The text with blanks for comments, character by character."""
    return COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def places_in(text: str, file: str = "") -> Iterator[Place]:
    """The places of one file, from the first to the last.

    Raises:
        AssertionError: the text has a barrier of a kind that the emulator does not know.
    """
    code = without_comments(text)
    if found := UNKNOWN.search(code):
        raise AssertionError(f"{file} has {found[0]}, which the emulator does not know: see places.py and threads.h.")
    for at in PLACE.finditer(code):
        yield Place(file, code.count("\n", 0, at.start()) + 1, at[1], at.start(), at.end())


def places() -> list[Place]:
    """All of them; the number of one is its index."""
    found = []
    for path in kernel_files():
        found += places_in(path.read_text(encoding="utf-8"), path.relative_to(SOURCES).as_posix())
    if len(found) > MOST_PLACES:
        raise AssertionError(f"{len(found)} barriers and masks; places.h and places.py have room for {MOST_PLACES}.")
    return found


def kernel_files() -> list[Path]:
    """The files that may have barriers: the sources for CUDA."""
    return source_files(".cu", ".cuh")


def numbered(text: str, first: int) -> str:
    """The text with ``barrier(number)`` for barriers and ``masked(number, mask)`` for masks, from ``first`` on."""
    found = list(places_in(text))
    for number, place in reversed(list(enumerate(found, first))):
        if place.is_barrier:
            text = f"{text[: place.begin]}zoo_emulator::barrier({number}{text[place.end :]}"
            continue
        end = end_of_argument(text, place.end)
        mask = text[place.end : end].strip() or "0xFFFFFFFFu"
        text = f"{text[: place.end]}zoo_emulator::masked({number}, {mask}){text[end:]}"
    return text


def end_of_argument(text: str, at: int) -> int:
    """Where the argument that begins at ``at`` ends: at its comma or at the last parenthesis."""
    depth = 0
    while depth or text[at] not in ",)":
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at
