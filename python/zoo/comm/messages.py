"""Point-to-point messages: single ones, batches, and the check of both ends."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zoo.comm.buffers import sendable
from zoo.comm.check import CollectiveMismatchError
from zoo.comm.log import CommsLog, OpStats

# Tags of the check: below those of the pairwise collectives, above a user's.
_CHECKED = 1 << 29
# Tags of ordinary messages: where backends look at them, one never fills a buffer of another size or dtype.
_SIZED = 1 << 28
_HEADER_BYTES = 256


@dataclass(frozen=True, eq=False)
class Send:
    """``tensor`` goes to rank ``peer`` of the group; it must not change until the handle completes.

    ``label`` says what it is, for the check: both ends give the same.
    """

    tensor: torch.Tensor
    peer: int
    label: str = ""


@dataclass(frozen=True, eq=False)
class Recv:
    """``tensor`` is filled by rank ``peer`` of the group. ``label`` as in :class:`Send`."""

    tensor: torch.Tensor
    peer: int
    label: str = ""


Message = Send | Recv


def check_messages(messages: Sequence[Message], rank: int, size: int) -> None:
    """Raise ValueError where one of them cannot be sent or received."""
    for message in messages:
        if not isinstance(message, (Send, Recv)):
            raise ValueError(f"batch got a {type(message).__name__} as a message; it takes Send and Recv.")
        verb = "send to" if isinstance(message, Send) else "recv from"
        if not 0 <= message.peer < size or message.peer == rank:
            raise ValueError(
                f"{verb} rank {message.peer} on rank {rank} of {size}; allowed are the other ranks of the group."
            )
        if not message.tensor.is_contiguous():
            raise ValueError(
                f"{verb} rank {message.peer} got a tensor of shape {tuple(message.tensor.shape)} and strides "
                f"{message.tensor.stride()}; a message is contiguous: give .contiguous()."
            )


def count_messages(messages: Sequence[Message], log: CommsLog, rank: int, nodes: Sequence[int] | None) -> OpStats:
    """Count each of them in the log, by the node of its peer where these are known; the row of the first, to time."""
    rows = []
    for message in messages:
        num_bytes = message.tensor.numel() * message.tensor.element_size()
        op = "send" if isinstance(message, Send) else "recv"
        num_local = None if nodes is None else 1 + (nodes[message.peer] == nodes[rank])
        rows.append(log.issued(op, num_bytes, 2, num_local))
    return rows[0]


def tags_of(messages: Sequence[Message]) -> list[int]:
    """Of messages that nobody checks: those of one size and dtype match in their order."""
    return [_tag(message.tensor.numel(), message.tensor.dtype) for message in messages]


@functools.lru_cache(maxsize=4096)
def _tag(numel: int, dtype: torch.dtype) -> int:
    return _SIZED + zlib.crc32(f"{numel} {dtype}".encode()) % (1 << 20)


def post(messages: Sequence[Message], group: Any, tags: Sequence[int]) -> list[Any]:
    """Issue them all, as one operation where the backend knows batches; returns works."""
    ops = [
        dist.P2POp(
            dist.isend if isinstance(message, Send) else dist.irecv,
            sendable(message.tensor),
            group=group,
            tag=tag,
            group_peer=message.peer,
        )
        for message, tag in zip(messages, tags, strict=True)
    ]
    if len(ops) > 1:
        return list(dist.batch_isend_irecv(ops))
    return [op.op(op.tensor, group=op.group, tag=op.tag, **_peer_of(op)) for op in ops]


def _peer_of(op: Any) -> dict[str, int]:
    return {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}


class _Compare:
    """Waits for nothing: stands between the works of the headers and those of the messages."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.wait = run


def post_checked(messages: Sequence[Message], group: Any, rank: int) -> list[Any]:
    """Issue a header of each message, both ways, and then the messages.

    Returns:
        What to wait for, in this order. It raises :class:`~zoo.comm.CollectiveMismatchError` on both ends of a message
        about which they disagree; such messages never meet where the backend looks at tags.
    """
    # Both ends of a pair must send their headers in one order, whichever end's list has which message first: those of
    # messages from the lower to the higher rank come before the others.
    order = sorted(messages, key=lambda m: (m.peer, (rank < m.peer) != isinstance(m, Send)))
    headers: list[Message] = []
    tags: list[int] = []
    for message in order:
        tag = _CHECKED + ((rank < message.peer) != isinstance(message, Send))
        room = torch.zeros(_HEADER_BYTES, dtype=torch.uint8, device=message.tensor.device)
        headers += [Send(_header(message, rank), message.peer), Recv(room, message.peer)]
        tags += [tag, tag]
    first = post(headers, group, tags)
    texts = [_text(message, rank) for message in messages]
    works = post(messages, group, [_CHECKED + 2 + zlib.crc32(text.encode()) % (1 << 20) for text in texts])

    def compare() -> None:
        for message, theirs in zip(order, headers[1::2], strict=True):
            other = bytes(theirs.tensor.tolist()).rstrip(b"\0").decode(errors="replace")
            mine = bytes(_header(message, rank).tolist()).rstrip(b"\0").decode(errors="replace")
            if other != mine:
                raise CollectiveMismatchError(
                    f"Ranks {rank} and {message.peer} of this group disagree about a message: rank {rank} has {mine}, "
                    f"rank {message.peer} has {other}. Sends and receives of a pair of ranks match in their order."
                )

    return [*first, _Compare(compare), *works]


def _text(message: Message, rank: int) -> str:
    source, target = (rank, message.peer) if isinstance(message, Send) else (message.peer, rank)
    kind = f"{message.tensor.numel()} {str(message.tensor.dtype).removeprefix('torch.')}"
    return f"{kind} from rank {source} to rank {target}{' (' + message.label + ')' if message.label else ''}"


def _header(message: Message, rank: int) -> torch.Tensor:
    text = _text(message, rank).encode()
    if len(text) > _HEADER_BYTES:  # what is cut off differs too
        text = text[: _HEADER_BYTES - 12] + f"... {zlib.crc32(text):08x}".encode()
    return torch.tensor(list(text.ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8, device=message.tensor.device)
