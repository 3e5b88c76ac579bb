"""Is every element there, exactly once?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zoo.checkpointing.errors import CheckpointError


@dataclass(frozen=True, order=True)
class Piece:
    """Elements [start, start + length) of one tensor in one role, in the file of ``rank``."""

    role: str
    name: str
    start: int
    length: int
    rank: int
    dtype: str


def group(pieces: Iterable[Piece]) -> dict[tuple[str, str], list[Piece]]:
    """(role, name) → pieces in the order of their start."""
    found: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    for piece in sorted(pieces):
        found[piece.role, piece.name].append(piece)
    return dict(found)


def check(pieces: Mapping[tuple[str, str], list[Piece]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Every tensor's pieces cover [0, numel) without gap and overlap, with one dtype.

    Raises:
        CheckpointError: names the tensor, the elements, and the files.
    """
    for (role, name), parts in pieces.items():
        if name not in shapes:
            raise CheckpointError(f"rank {parts[0].rank} holds {role} {name!r}, a tensor that has no shape")
        _check_one(f"{role} {name!r}", parts, math.prod(shapes[name]))


def _check_one(what: str, parts: list[Piece], numel: int) -> None:
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise CheckpointError(f"{what} is stored in several dtypes: {', '.join(sorted(dtypes))}")
    end, holder = 0, -1
    for part in parts:
        if part.length == 0:
            continue
        if part.start > end:
            raise CheckpointError(f"elements {end} to {part.start - 1} of {what} are missing: no rank holds them")
        if part.start < end:
            last = min(end, part.start + part.length) - 1
            raise CheckpointError(
                f"elements {part.start} to {last} of {what} are there twice: from rank {holder} and from rank "
                f"{part.rank}"
            )
        end, holder = part.start + part.length, part.rank
    if end != numel:
        many = "missing: no rank holds them" if end < numel else "too many"
        low, high = min(end, numel), max(end, numel) - 1
        raise CheckpointError(f"elements {low} to {high} of {what} (of {numel}) are {many}")
