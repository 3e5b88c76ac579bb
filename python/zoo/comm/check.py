"""The fingerprint check: do all ranks of a group issue the same collective? And blocks without them, or values."""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

_values_count: ContextVar[bool] = ContextVar("zoo_comm_values_count", default=True)
_alone: ContextVar[bool] = ContextVar("zoo_comm_alone", default=False)


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Collectives and messages of communicators inside raise NotImplementedError: other ranks do not come along."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def check_allowed(comm: object) -> None:
    """Raise NotImplementedError inside of :func:`no_collectives`."""
    if _alone.get():
        raise NotImplementedError(f"a collective of {comm!r} in a forward that this rank makes alone.")


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Tensors inside have memory and mean nothing: whoever compares values of ranks leaves it."""
    token = _values_count.set(False)
    try:
        yield
    finally:
        _values_count.reset(token)


def values_count() -> bool:
    """Whether values mean something: not inside of :func:`without_values`."""
    return _values_count.get()


class CollectiveMismatchError(ValueError):
    """The ranks of a group called different collectives at the same position of their sequence."""


def fingerprint(description: str) -> int:
    """A signed 63-bit integer that differs for different descriptions (up to hash collisions)."""
    return int.from_bytes(hashlib.blake2b(description.encode(), digest_size=8).digest(), "little") >> 1


def verify(group: Any, description: str, device: torch.device) -> None:
    """Raise :class:`CollectiveMismatchError` on every rank unless all ranks of ``group`` pass the same description.

    Costs one all-gather of 8 bytes a rank; only when the fingerprints differ are the descriptions themselves
    exchanged, so that the error can name who called what.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = torch.tensor([fingerprint(description)], dtype=torch.int64, device=device)
    everyone = torch.empty(size, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(everyone, mine, group=group)
    if bool((everyone == mine).all()):
        # A rank that differs from rank 0 sees it here itself: all leave this branch together or none does.
        return
    said: list[Any] = [None] * size
    dist.all_gather_object(said, description, group=group)
    callers: dict[str, list[int]] = defaultdict(list)
    for r, text in enumerate(said):
        callers[text].append(r)
    listing = "; ".join(
        f"rank{'s' if len(rs) > 1 else ''} {', '.join(map(str, rs))} called {text}" for text, rs in callers.items()
    )
    raise CollectiveMismatchError(
        f"The ranks of this group disagree about their next collective (seen on rank {rank}): {listing}. "
        "Every rank must issue the same collectives in the same order; look for a branch that depends on the rank or "
        "on the data, or for a module that only some ranks run."
    )


def verify_splits(everyone: list[tuple[list[int], list[int]]]) -> None:
    """Raise :class:`CollectiveMismatchError` unless what each rank gives to each other is what that one expects.

    ``everyone`` has (rows from each rank, rows to each rank), of every rank.
    """
    for source, (_, given) in enumerate(everyone):
        for target, (expected, _) in enumerate(everyone):
            if given[target] != expected[source]:
                raise CollectiveMismatchError(
                    f"The ranks of this group disagree about an all-to-all: rank {source} gives {given[target]} rows "
                    f"to rank {target}, which expects {expected[source]} (in_splits {given} on rank {source}, "
                    f"out_splits {expected} on rank {target})."
                )
