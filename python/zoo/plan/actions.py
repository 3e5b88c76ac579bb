"""Actions: frozen records of what happens to buckets.

A list of them is comparable: two ranks that do the same have equal lists, whatever their data and their timing. What
differs between ranks (the elements of a shard, where they live) is not part of an action.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class Kind(enum.Enum):
    """What is done to a bucket."""

    UNSHARD = "unshard"
    """Begin to bring the whole parameters to every rank of the shard group, because they are needed now."""
    PREFETCH = "prefetch"
    """The same, because they will be needed soon."""
    RESHARD = "reshard"
    """Give up what is whole; each rank keeps its shard."""
    REDUCE = "reduce"
    """Begin to bring the gradients to their mean."""
    PUBLISH = "publish"
    """After an update: bring updated shards to everyone who keeps the parameters whole."""
    WAIT = "wait"
    """Wait for one of the above (:attr:`Action.of`)."""
    VOTE = "vote"
    """Agree on the forward that is gone back through next. On no bucket."""
    COMPUTE = "compute"
    """What is computed until the next action, or until another unit computes. On no bucket."""


STARTS = frozenset({Kind.UNSHARD, Kind.PREFETCH, Kind.REDUCE, Kind.PUBLISH, Kind.VOTE})
"""Kinds that begin communication: their order is the same on all ranks of a group."""


class Moment(enum.Enum):
    """In what an action happens."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OUTSIDE = "outside"
    """A step, or a verb of the user."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """``op`` over ``size`` ranks; ``num_bytes`` of the whole logical buffer."""

    op: str
    size: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.op} of {self.num_bytes:,} bytes over {self.size}"


@dataclass(frozen=True, kw_only=True)
class Action:
    """One action.

    Attributes:
        bucket: its index; -1 where there is none.
        label: the units whose parameters the bucket holds.
        num_bytes: of the whole bucket; of a computation, read and written.
        flops: of a computation, 2 · multiply-accumulates.
        of: what a wait waits for.
        moment, context, unit: in what it happens: a forward or backward, of which pass or micro-batch, at which unit's
            call. Empty where there is none; the model itself is the unit "(model)".
        collectives: what it starts, in order. Of a collective in two stages the second begins later: at the next action
            of the same kind, or with the wait.
    """

    kind: Kind
    bucket: int = -1
    label: str = ""
    num_bytes: int = 0
    flops: int = 0
    of: Kind | None = None
    moment: Moment = Moment.OUTSIDE
    context: str = ""
    unit: str = ""
    collectives: tuple[Collective, ...] = ()

    @property
    def verb(self) -> str:
        """The kind, and what a wait is for."""
        return f"{self.kind.value} {self.of.value}" if self.of is not None else self.kind.value

    def cells(self) -> tuple[str, ...]:
        """What a table shows: when, for whom, what, on what, which collectives."""
        when = f"{self.moment.value} of {self.context}" if self.context else self.moment.value
        on = f"{self.bucket}: {self.label}" if self.bucket >= 0 else ""
        starts = ", ".join(map(str, self.collectives))
        if self.kind is Kind.COMPUTE:
            starts = f"{self.flops:,} FLOPs, {self.num_bytes:,} bytes"
        return (when, self.unit, self.verb, on, starts)

    def __str__(self) -> str:
        return "  ".join(cell for cell in self.cells() if cell)


class Actions(list[Action]):
    """Actions in the order in which they began. ``print`` shows a table."""

    def starts(self) -> Actions:
        """Those that begin communication: what the ranks have to agree on."""
        return Actions(action for action in self if action.kind in STARTS)

    def of_kind(self, *kinds: Kind) -> Actions:
        """Those of these kinds."""
        return Actions(action for action in self if action.kind in kinds)

    def collectives(self) -> list[Collective]:
        """What they start, in order, groups of one rank left out."""
        return [collective for action in self for collective in action.collectives if collective.size > 1]

    @property
    def flops(self) -> int:
        """Of all computations."""
        return sum(action.flops for action in self)

    def whole_bytes(self) -> list[int]:
        """After each action: bytes of the buckets that are gathered or on their way, of those that the list gathers."""
        found, now, held = [], 0, set()
        for action in self:
            if action.kind in (Kind.UNSHARD, Kind.PREFETCH) and action.bucket not in held:
                held.add(action.bucket)
                now += action.num_bytes
            elif action.kind is Kind.RESHARD and action.bucket in held:
                held.remove(action.bucket)
                now -= action.num_bytes
            found.append(now)
        return found

    def __str__(self) -> str:
        if not self:
            return "no actions"
        return "\n".join(_table([("when", "unit", "action", "bucket", "starts"), *(a.cells() for a in self)]))


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
