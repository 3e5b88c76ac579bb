"""A checkpoint written anew as another number of ranks would have: also how version 2 becomes the present version.

Nobody needs it to continue at another world size, which loading does by itself. It is for what looks at files: fewer of
them, or of an even size; and for archives, whose format should not grow old.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from zoo.checkpointing.client_state import OF_RANK, RANKS
from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.format.disk import LOCAL, place_of
from zoo.checkpointing.format.exact import dtype_named
from zoo.checkpointing.format.names import tags_of
from zoo.checkpointing.reading import Checkpoint
from zoo.checkpointing.writing import save
from zoo.comm import Communicator
from zoo.layout import StateSlice, Stored

_log = logging.getLogger("zoo.checkpointing")
MOST_RANKS = 1024
PIECE_BYTES = 64 << 20
"""What is in memory at once of a tensor."""


class Readable(Protocol):
    """An open checkpoint, of zoo or of another system."""

    def read(self, name: str, role: str, start: int, length: int) -> torch.Tensor:
        """See :meth:`zoo.checkpointing.Checkpoint.read`."""


def slice_to_read(
    name: str, role: str, start: int, length: int, shape: tuple[int, ...], dtype: torch.dtype, found: Readable,
    told: Callable[[int], None],
) -> StateSlice:  # fmt: skip
    """A slice of a checkpoint that is read when it is written; ``told`` hears of its bytes."""

    def load(first: int, count: int) -> torch.Tensor:
        told(count * dtype.itemsize)
        return found.read(name, role, first, count)

    return StateSlice(name, role, start, length, shape, Stored(load, dtype, start, length))


def num_bytes(found: Checkpoint) -> int:
    """Of all tensors in all roles."""
    return sum(state.numel * dtype_named(state.dtype).itemsize for state in found.index.states)


def reshard(
    found: Checkpoint, directory: str | os.PathLike[str], num_ranks: int, *,
    told: Callable[[int], None] = lambda num_bytes: None,
) -> Path:  # fmt: skip
    """Write the checkpoint into another directory, under its tag, as ``num_ranks`` ranks would have: all tensors in a
    row, cut evenly by bytes.

    What belongs to one rank (random numbers, buffers) is kept where the number of ranks stays; where it does not, no
    rank would take it when it is loaded, and it is left out, but for the ``client_state`` of ranks that the new one has
    too. The same number of ranks and another version of the format
    lose nothing.

    Args:
        told: hears of the bytes that are read.

    Returns:
        The new checkpoint's directory.

    Raises:
        ValueError: a number of ranks that cannot be, or a directory that has this checkpoint or another one of its tag.
        CheckpointError: what is wrong with the checkpoint, or kept the new one from being written.
    """
    from zoo import sim

    if not 1 <= num_ranks <= MOST_RANKS:
        raise ValueError(f"num_ranks = {num_ranks}; a checkpoint is written as 1 to {MOST_RANKS} ranks would")
    disk, root = place_of(directory)
    if disk is LOCAL is found.disk and os.path.realpath(root) == os.path.realpath(found.path.parent):
        raise ValueError(f"{str(root)!r} is the directory of the checkpoint itself; give another one")
    if found.tag in tags_of(disk, root):
        raise ValueError(f"{str(root)!r} has a checkpoint {found.tag!r}; remove it, or give another directory")

    clients = [rank for rank in found.meta.get(RANKS, ()) if rank < num_ranks]
    if len(clients) < len(found.meta.get(RANKS, ())):
        lost = ", ".join(str(rank) for rank in found.meta[RANKS] if rank >= num_ranks)
        _log.warning("the client_state of rank(s) %s is left out: %d ranks would not ask for it.", lost, num_ranks)
    meta = {key: value for key, value in found.meta.items() if key != RANKS} | ({RANKS: clients} if clients else {})

    def job(rank: int) -> None:
        own = found.rank_state(rank) if rank in clients or num_ranks == found.world_size else {}
        if num_ranks != found.world_size:
            own = {name: value for name, value in own.items() if name == OF_RANK}
        mine = list(_pieces(found, rank, num_ranks, told))
        save(root, found.tag, mine, found.scalars, meta, Communicator(), rank_state=own, disk=disk)

    try:
        sim.run(num_ranks, job, timeout_s=1e9)
    except sim.RankError as error:
        if isinstance(error.__cause__, (CheckpointError, OSError)):
            raise error.__cause__ from None
        raise
    return root / found.tag


def _pieces(found: Checkpoint, rank: int, num_ranks: int, told: Callable[[int], None]) -> Iterator[StateSlice]:
    """The part of one rank."""
    total, before = num_bytes(found), 0
    low, high = (total * k // num_ranks for k in (rank, rank + 1))
    for state in found.index.states:
        dtype = dtype_named(state.dtype)
        each, numel = dtype.itemsize, state.numel
        # An element belongs to the rank in whose part it begins.
        start, stop = (min(max(-(-(place - before) // each), 0), numel) for place in (low, high))
        step = max(PIECE_BYTES // each, 1)
        for begin in range(start, stop, step):
            length = min(step, stop - begin)
            yield slice_to_read(state.name, state.role, begin, length, state.shape, dtype, found, told)
        if numel == 0 and rank == 0:
            yield slice_to_read(state.name, state.role, 0, 0, state.shape, dtype, found, told)
        before += numel * each
