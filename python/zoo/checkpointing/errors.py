"""The one error of this package, and how ranks agree on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from zoo.comm import Communicator

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read, and why.

    ``everywhere`` is true when every rank of the group raises it with the same words.
    """

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


class MissingStateError(CheckpointError, KeyError):
    """The checkpoint has no such tensor, or not in that role."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it


def together(comm: Communicator, what: str, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and give everyone everyone's result, in rank order. A collective.

    Raises:
        CheckpointError: on all ranks alike when ``work`` raised on any of them; names those ranks and their errors.
    """
    cause: Exception | None = None
    mine: tuple[str | None, Any]
    try:
        mine = (None, work())
    except Exception as error:
        cause = error
        mine = (str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}", None)
    everyone: list[Any] = [mine]
    if comm.size > 1:
        everyone = [None] * comm.size
        dist.all_gather_object(everyone, mine, group=comm.group)
    failed: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(everyone):
        if text is not None:
            failed.setdefault(text, []).append(rank)
    if failed:
        told = "; ".join(f"{_ranks(ranks, comm.size)}{text}" for text, ranks in failed.items())
        raise CheckpointError(f"{what} failed: {told}", everywhere=True) from cause
    return [value for _, value in everyone]


def _ranks(ranks: list[int], size: int) -> str:
    if len(ranks) == size:
        return ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: "
