"""What a collective sends and how long it takes: bytes of a rank, by the algorithms with the least of them; seconds."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zoo.cost.hardware import Hardware

__all__ = ["WIRE_FACTOR", "Group", "Hop", "Traffic", "seconds", "traffic_of", "wire_bytes"]

WIRE_FACTOR: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0 if n > 1 else 0.0,
    "all_gather_object": lambda n: (n - 1) / n,
    "broadcast_object": lambda n: 1.0,
    "barrier": lambda n: 0.0,
    "send": lambda n: 1.0,
    "recv": lambda n: 0.0,
}
"""Of the bytes of the whole logical buffer, the part that each of n ranks sends."""


def wire_bytes(op: str, message_bytes: int, group_size: int, num_local: int | None) -> tuple[int, int, int]:
    """(all, to the same node, to other nodes): what one rank sends.

    The conventions are those of ``zoo.comm.OpStats``: to other nodes goes what goes there if every message goes
    straight to the rank that needs it.

    Args:
        num_local: how many ranks of the group are on the sender's node; None, for unknown, gives (all, 0, 0).
    """
    sent = round(message_bytes * WIRE_FACTOR[op](group_size))
    if num_local is None or group_size == 1:
        return sent, 0, 0
    inter = round(sent * (group_size - num_local) / (group_size - 1))
    return sent, sent - inter, inter


class Group(Protocol):
    """The ranks of a collective, such as a :class:`zoo.comm.Communicator`."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def num_local(self) -> int | None:
        """How many of them are on this rank's node; None where nobody knows."""


@dataclass(frozen=True)
class Hop:
    """One collective: its kind, its group, the bytes of its whole logical buffer."""

    op: str
    comm: Group
    message_bytes: int

    def sent(self) -> tuple[int, int, int]:
        """Bytes this rank sends: all, to its own node, to other nodes."""
        if self.comm.size == 1:
            return 0, 0, 0
        return wire_bytes(self.op, self.message_bytes, self.comm.size, self.comm.num_local)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends, by operation.

    Attributes:
        wire: all. intra: those of them for ranks of its own node. inter: those for other nodes. Neither knows of groups
            of which nobody knows where they are.
    """

    wire: dict[str, int] = field(default_factory=dict)
    intra: dict[str, int] = field(default_factory=dict)
    inter: dict[str, int] = field(default_factory=dict)


def traffic_of(hops: Iterable[Hop]) -> Traffic:
    """The sum; what is nothing is left out."""
    totals: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for hop in hops:
        for total, sent in zip(totals, hop.sent(), strict=True):
            total[hop.op] += sent
    wire, intra, inter = ({op: sent for op, sent in total.items() if sent} for total in totals)
    return Traffic(wire=wire, intra=intra, inter=inter)


def seconds(
    op: str, num_bytes: float, ranks: int, hardware: Hardware, *, local: int, rings: int | None = None
) -> float:
    """How long a collective takes, from when the last rank has come to it.

    Inside of a node, a ring of n ranks: (n - 1) steps, twice as many for an all-reduce, of ``latency + bytes / n /
    rate``; or as it was measured. Over nodes the ring passes each node once: what a node sends leaves it through
    ``rings`` adapters, and the steps between nodes have the network's latency, those inside of a node that of its link.
    NCCL goes on to trees where a ring's latency would be more than its bytes, and the lesser of both is taken: a tree
    has log2(nodes) of these steps on the way up, and a node a chain (Sanders, Speck and Träff 2009, "Two-tree
    algorithms for full bandwidth"). An all-reduce goes up and down, a gather or a reduction to parts one way. An
    all-to-all has no ring: each of a node's l ranks sends ``bytes · (n - l) / n`` straight to other nodes, in n - l
    messages, all of it through the adapters.

    Args:
        num_bytes: of the whole logical buffer. ranks: of the group; local: those of them on one node.
        rings: adapters of a node that this group uses; its share of all of them by default, where the ranks of a node
            are in as many groups as there is place for.

    Raises:
        ValueError: a collective that is not known; no rank on a node, or no adapter.
    """
    if op not in WIRE_FACTOR:
        raise ValueError(f"no collective is named {op!r}; known are {', '.join(WIRE_FACTOR)}.")
    if ranks == 1 or num_bytes <= 0:
        return 0.0
    factor = WIRE_FACTOR[op](ranks)
    steps = (2 if op == "all_reduce" else 1) * (ranks - 1)
    if local < 1 or (rings is not None and rings < 1):
        raise ValueError(f"a collective got local={local} and rings={rings}; both are at least 1.")
    if local >= ranks:
        return _inside(op, num_bytes, ranks, hardware, factor, steps)
    nodes = math.ceil(ranks / local)
    share = local / hardware.ranks_per_node
    adapters = min(rings, hardware.adapters) if rings is not None else max(hardware.adapters * share, 1e-9)
    if op == "all_to_all":
        return _to_all(num_bytes, ranks, hardware, local, adapters)
    rate = min(adapters * hardware.between.bytes_per_s, hardware.inside.bytes_per_s * (1 if local > 1 else math.inf))
    hops = steps // (ranks - 1)
    around = hops * ((nodes - 1) * hardware.between.latency_s + nodes * (local - 1) * hardware.inside.latency_s)
    tree = hops * (math.log2(nodes) * hardware.between.latency_s + (local - 1) * hardware.inside.latency_s)
    return num_bytes * factor / rate + min(around, tree)


def _to_all(num_bytes: float, ranks: int, hardware: Hardware, local: int, adapters: float) -> float:
    """Every rank sends a message to every other one: a node's adapters carry what all of its ranks send beyond it."""
    part = num_bytes / ranks
    away = local * (ranks - local) * part / (adapters * hardware.between.bytes_per_s)
    here = (local - 1) * part / hardware.inside.bytes_per_s
    latency = (ranks - local) * hardware.between.latency_s + (local - 1) * hardware.inside.latency_s
    return max(away, here) + latency


def _inside(op: str, num_bytes: float, ranks: int, hardware: Hardware, factor: float, steps: int) -> float:
    table = hardware.inside.all_reduce.get(ranks)
    if table is None:
        return num_bytes * factor / hardware.inside.bytes_per_s + steps * hardware.inside.latency_s
    # Of an all-reduce, each half (reduce-scatter, all-gather) sends half of the bytes.
    part = factor / WIRE_FACTOR["all_reduce"](ranks)
    return part * _interpolated(table, num_bytes)


def _interpolated(table: Sequence[tuple[float, float]], num_bytes: float) -> float:
    """Between the points that are there; below the first its time, above the last its rate."""
    sizes = [size for size, _ in table]
    at = bisect.bisect_left(sizes, num_bytes)
    if at == 0:
        return table[0][1]
    if at == len(table):
        size, time_s = table[-1]
        return time_s * num_bytes / size
    (size, time_s), (more, longer) = table[at - 1], table[at]
    return time_s + (longer - time_s) * (num_bytes - size) / (more - size)
