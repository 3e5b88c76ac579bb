"""Python objects between the ranks of one job, pickled: never for what comes from a file."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from zoo.comm.failures import RankFailedError

if TYPE_CHECKING:
    from zoo.comm.communicator import Communicator

_FAILED = -1  # the size that stands for an object that cannot be pickled


def pack(value: Any, device: torch.device) -> tuple[torch.Tensor, Exception | None]:
    """(n,) bytes, or none and why: other ranks wait for this one, and are told before it raises."""
    try:
        data, error = bytearray(pickle.dumps(value)), None
    except Exception as raised:
        return torch.empty(0, dtype=torch.uint8, device=device), raised
    return torch.frombuffer(data, dtype=torch.uint8).to(device), error


def size_of(packed: torch.Tensor, error: Exception | None) -> torch.Tensor:
    """(1,) what is sent ahead of the bytes."""
    return torch.tensor([packed.numel() if error is None else _FAILED], device=packed.device)


def check_packed(sizes: Sequence[int], ranks: Sequence[int], error: Exception | None) -> None:
    """Raise on all ranks if what one of ``ranks``, with these ``sizes``, gave could not be pickled."""
    if error is not None:
        raise error
    failed = tuple(rank for rank, size in zip(ranks, sizes, strict=True) if size == _FAILED)
    if failed:
        raise RankFailedError(
            f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))} gave an object that cannot be "
            "pickled, which nobody receives: give plain data.", failed,
        )  # fmt: skip


def unpack(data: torch.Tensor) -> Any:
    """The object of (n,) bytes."""
    return pickle.loads(data.cpu().numpy().tobytes())


def gather_object(comm: Communicator, value: Any) -> list[Any] | None:
    """The ``value`` of every rank, in rank order, on rank 0; None elsewhere. Pickled, as above.

    Each rank sends its own once and receives nothing, unlike in ``all_gather_object``.

    Raises:
        Exception: on a rank whose value cannot be pickled, what pickle says; rank 0 then raises a RankFailedError.
    """
    if comm.size == 1:
        return [value]
    mine, error = pack(value, comm.device)
    if comm.rank:
        comm.send(size_of(mine, error), 0).wait()
        if error is not None:
            raise error
        if mine.numel():
            comm.send(mine, 0).wait()
        return None
    found = [value]
    for rank in range(1, comm.size):
        size = torch.zeros(1, dtype=torch.int64, device=comm.device)
        comm.recv(size, rank).wait()
        check_packed(size.tolist(), [comm.ranks[rank]], None)
        data = torch.empty(int(size), dtype=torch.uint8, device=comm.device)
        comm.recv(data, rank).wait()
        found.append(unpack(data))
    return found
