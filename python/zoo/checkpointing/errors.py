"""The one error of this package, and how ranks agree on it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

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


class DamageError(CheckpointError):
    """Bytes of a checkpoint are not those that were written, or are gone."""


class UnreadableError(CheckpointError):
    """What is there may not or cannot be read at this time (permissions, too many open files, a stale handle): this
    says nothing about whether it is whole."""


_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def no_access(error: OSError) -> bool:
    """Whether an error of a disk is about who reads, and not about what is read."""
    return error.errno in _NO_ACCESS


def together(comm: Communicator, what: str, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and give everyone everyone's result, in rank order. A collective.

    Raises:
        CheckpointError: on all ranks alike when ``work`` raised on any of them; names those ranks and their errors.
    """
    return comm_together(
        comm, what, work, error=lambda text, ranks: CheckpointError(text, everywhere=True), plain=CheckpointError
    )


def alike(comm: Communicator, what: str, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank, and raise on all of them when it raised on one; gives this rank's own result.

    A collective that moves one number a rank, and more only where something went wrong.

    Raises:
        CheckpointError: as :func:`together` does.
    """
    found: list[T] = []
    error: Exception | None = None
    try:
        found.append(work())
    except Exception as raised:
        error = raised
    if anywhere(comm, error is not None):
        together(comm, what, partial(_raise, error))
    return found[0]


def anywhere(comm: Communicator, here: bool) -> bool:
    """Whether it is so on any rank. A collective."""
    found = torch.tensor([here], dtype=torch.int32, device=comm.device)
    comm.all_reduce(found, "max").wait()
    return bool(int(found))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
