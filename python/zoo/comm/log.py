"""The comms log: what a communicator moved, by operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zoo.cost.collectives import wire_bytes

if TYPE_CHECKING:
    import torch


@dataclass
class OpStats:
    """Totals of one kind of operation on one rank.

    ``message_bytes`` is the size of the whole logical buffer (the gathered tensor, the tensor to reduce);
    ``wire_bytes`` is what this rank has to send with a bandwidth-optimal algorithm, the convention of nccl-tests'
    "bus bandwidth": with N ranks, (N-1)/N of the message for all-gather, reduce-scatter and all-to-all, 2(N-1)/N for
    all-reduce, the message itself for broadcast and for a send, nothing for a receive. ``time_s`` runs from issuing an
    operation to its completion, so for overlapped operations it includes the computation they hide behind. On CUDA it
    is the time between two events of the stream; nobody waits for them, so the last operations may still be missing.

    Where the communicator knows the nodes, ``intra_bytes`` are the wire bytes for ranks of the same node and
    ``inter_bytes`` those for other nodes, as if every message went straight to the rank that needs it: each of the N-1
    peers gets an equal part. That is what gloo and all-to-all do. In a ring (nccl) only one rank of a node sends to
    another node, so fewer bytes leave the node, at most 1/L of these with L ranks of a node; the log does not know it.
    """

    count: int = 0
    message_bytes: int = 0
    wire_bytes: int = 0
    intra_bytes: int = 0
    inter_bytes: int = 0
    host_time_s: float = 0.0
    spans: list[tuple[Any, Any]] = field(default_factory=list, repr=False, compare=False)

    def add(self, message_bytes: int, wire: int, intra: int, inter: int) -> None:
        """Count bytes: of the message, sent in all, to the same node, to other nodes."""
        self.message_bytes += message_bytes
        self.wire_bytes += wire
        self.intra_bytes += intra
        self.inter_bytes += inter

    @property
    def time_s(self) -> float:
        """Seconds of the operations that are complete."""
        while self.spans and self.spans[0][1].query():
            begin, end = self.spans.pop(0)
            self.host_time_s += begin.elapsed_time(end) / 1e3
        return self.host_time_s

    @property
    def bus_bandwidth(self) -> float:
        """Wire bytes per second, 0.0 before anything was timed."""
        time_s = self.time_s
        return self.wire_bytes / time_s if time_s > 0 else 0.0


def bytes_of_rows(
    given: torch.Tensor, splits: Sequence[int], rank: int, nodes: Sequence[int] | None
) -> tuple[int, int, int, int]:
    """(message, all, to the same node, to other nodes): what ``rank`` sends of an uneven all-to-all.

    Args:
        given: (sum of splits, …) what it gives, ``splits[r]`` rows to rank r.
        nodes: the node of each rank, None if unknown.
    """
    row_bytes = given[:1].numel() * given.element_size()
    wire = (sum(splits) - splits[rank]) * row_bytes
    if nodes is None:
        return len(given) * row_bytes, wire, 0, 0
    inter = sum(n for n, node in zip(splits, nodes, strict=True) if node != nodes[rank]) * row_bytes
    return len(given) * row_bytes, wire, wire - inter, inter


@dataclass
class CommsLog:
    """Byte and time accounting of a communicator; cheap enough to be always on."""

    ops: dict[str, OpStats] = field(default_factory=dict)
    num_issued: int = 0
    """Collectives ever, alike on ranks at the same place of their programs; :meth:`reset` does not forget them. Sends
    and receives do not count: a rank that receives from all others has more of them than these."""

    def issued(self, op: str, message_bytes: int, group_size: int, num_local: int | None = None) -> OpStats:
        """Count one call of ``op``; returns the row so that the caller can add the time when it completes."""
        return self.sent(op, message_bytes, *wire_bytes(op, message_bytes, group_size, num_local))

    def sent(self, op: str, message_bytes: int, wire: int, intra: int, inter: int) -> OpStats:
        """As :meth:`issued`, where the bytes are known by where they go: all, to the same node, to other nodes."""
        row = self.ops.get(op)
        if row is None:
            row = self.ops[op] = OpStats()
        row.count += 1
        self.num_issued += op not in ("send", "recv")
        row.add(message_bytes, wire, intra, inter)
        if len(row.spans) > 256:  # take in what is complete, so that they do not pile up
            row.time_s  # noqa: B018
        return row

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank had to send, over all operations."""
        return sum(row.wire_bytes for row in self.ops.values())

    @property
    def inter_bytes(self) -> int:
        """Those of them that went to other nodes, as far as nodes were known."""
        return sum(row.inter_bytes for row in self.ops.values())

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.ops.clear()

    def table(self) -> str:
        """The log as text: a header line, then one line an operation."""
        split = any(row.intra_bytes or row.inter_bytes for row in self.ops.values())
        more = f"{'intra MB':>12}{'inter MB':>12}" if split else ""
        lines = [f"{'op':<16}{'count':>10}{'message MB':>14}{'wire MB':>12}{more}{'time ms':>12}{'bus GB/s':>12}"]
        for op, row in sorted(self.ops.items()):
            more = f"{row.intra_bytes / 1e6:>12.3f}{row.inter_bytes / 1e6:>12.3f}" if split else ""
            lines.append(
                f"{op:<16}{row.count:>10}{row.message_bytes / 1e6:>14.3f}{row.wire_bytes / 1e6:>12.3f}{more}"
                f"{row.time_s * 1e3:>12.2f}{row.bus_bandwidth / 1e9:>12.3f}"
            )
        return "\n".join(lines)
