"""Python objects between the ranks of one job, pickled: never for what comes from a file."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zoo.comm.failures import RankFailedError
from zoo.comm.handles import Pending
from zoo.cost.collectives import wire_bytes

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


def all_gather_object(comm: Communicator, value: Any) -> list[Any]:
    """See :meth:`zoo.comm.Communicator.all_gather_object`."""
    if comm._transport is None:
        return [value]
    mine, error = pack(value, comm.device)
    comm._agree("all_gather_object", mine[:0])
    sizes = torch.empty(comm.size, dtype=torch.int64, device=comm.device)
    size, transport, label = size_of(mine, error), comm._transport, "all_gather_object"
    row = comm.log.sent("all_gather_object", 0, 0, 0, 0)
    comm._issue(label, sizes, lambda: transport.all_gather(sizes, size, label), row).wait()
    each: list[int] = sizes.tolist()
    check_packed(each, comm.ranks, error)
    full = torch.zeros(comm.size * max(each), dtype=torch.uint8, device=comm.device)
    shard = full.chunk(comm.size)[comm.rank]
    shard[: mine.numel()] = mine
    row.add(full.numel(), *wire_bytes(label, full.numel(), comm.size, comm.num_local))
    comm._issue(label, full, lambda: transport.all_gather(full, shard, label), row).wait()
    return [unpack(part[:n]) for part, n in zip(full.chunk(comm.size), each, strict=True)]


def broadcast_object(comm: Communicator, value: Any, src: int) -> Any:
    """See :meth:`zoo.comm.Communicator.broadcast_object`."""
    if not 0 <= src < comm.size:
        raise ValueError(f"broadcast_object got src={src}; the group has ranks 0 to {comm.size - 1}.")
    if comm.size == 1:
        return value
    mine, error = pack(value if comm.rank == src else None, comm.device)
    comm._agree(f"broadcast_object[src={src}]", mine[:0])
    size, group = size_of(mine, error), comm.group
    row = comm.log.sent("broadcast_object", 0, 0, 0, 0)

    def give(tensor: torch.Tensor) -> None:
        comm._issue(
            "broadcast_object",
            tensor,
            lambda: Pending([dist.broadcast(tensor, comm.ranks[src], group, async_op=True)]),
            row,
        ).wait()

    give(size)
    check_packed(size.tolist(), [comm.ranks[src]], error)
    data = mine if comm.rank == src else torch.empty(int(size), dtype=torch.uint8, device=comm.device)
    row.add(data.numel(), *wire_bytes("broadcast_object", data.numel(), comm.size, comm.num_local))
    give(data)
    return value if comm.rank == src else unpack(data)
