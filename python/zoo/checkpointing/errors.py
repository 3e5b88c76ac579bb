"""The one error of this package, and how ranks agree on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zoo.comm import Communicator
from zoo.comm import together as comm_together

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
    return comm_together(
        comm, what, work, error=lambda text, ranks: CheckpointError(text, everywhere=True), plain=CheckpointError
    )
