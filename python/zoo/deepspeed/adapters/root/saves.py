"""What ``save_checkpoint`` of a program says, agreed on by all ranks before anything is written."""

from __future__ import annotations

import logging
from typing import Any

from zoo.checkpointing import CheckpointError, together
from zoo.checkpointing.disk import check_named
from zoo.comm import Communicator
from zoo.deepspeed.adapters.root.client_state import plain_state

_log = logging.getLogger("zoo.deepspeed")


class TagError(CheckpointError, AssertionError):
    """Ranks give other tags, which DeepSpeed asserts that they do not."""


def agreed(comm: Communicator, save_dir: Any, tag: Any, client_state: Any, mode: str) -> tuple[str | None, Any]:
    """(tag, client state) of a save. Collective.

    A checkpoint of zoo is one whole under one tag: where ranks give several, that of rank 0 counts.

    Args:
        mode: what becomes of several: "FAIL" is an error, "WARN" a warning on rank 0, "IGNORE" nothing.

    Raises:
        ValueError: (zoo.checkpointing.CheckpointError, on all ranks) the folder has no name, or the state cannot be
            saved.
        TagError: on all ranks, see ``mode``.
    """
    state: list[Any] = []

    def check() -> str | None:
        try:
            check_named(save_dir)
        except ValueError as error:
            raise CheckpointError(f"save_dir={error}") from None
        state.append(plain_state(client_state))
        return None if tag is None else str(tag)

    tags = together(comm, "save_checkpoint()", check)
    others = [f"{given!r} on rank {rank}" for rank, given in enumerate(tags) if given != tags[0]]
    if others:
        told = f"save_checkpoint(): the tag is {tags[0]!r} on rank 0 and {', '.join(others[:4])}"
        if mode == "FAIL":
            raise TagError(f"{told}, and checkpoint.tag_validation is 'Fail'. Give one tag on all ranks.")
        if mode == "WARN" and comm.rank == 0:
            _log.warning("%s; that of rank 0 counts.", told)
    return tags[0], state[0]
