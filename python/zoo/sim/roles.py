"""One rank for each role: which ranks of a job run, and which of them each other one is like."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from zoo.sim.calls import Call

__all__ = ["Absent", "Roles", "counted"]


class Roles:
    """The first rank of each role runs, and stands in for the others of its role.

    Attributes:
        running: the ranks that run, in order.
    """

    def __init__(self, world_size: int, role_of: Callable[[int], Hashable] | None) -> None:
        self.world_size = world_size
        self._stand_in: list[int] | None = None
        self.running: tuple[int, ...] = tuple(range(world_size))
        if role_of is not None:
            first: dict[Any, int] = {}
            self._stand_in = [first.setdefault(role_of(rank), rank) for rank in self.running]
            self.running = tuple(first.values())

    @property
    def all_run(self) -> bool:
        """Whether every rank runs."""
        return len(self.running) == self.world_size

    def stand_in(self, rank: int) -> int:
        """The rank that runs in its place: itself, if it runs."""
        return rank if self._stand_in is None else self._stand_in[rank]

    def places(self, ranks: tuple[int, ...]) -> list[int]:
        """Of each rank of a group, where in the group its stand-in is.

        Raises:
            ValueError: some stand-in is no member.
        """
        if self._stand_in is None:
            return list(range(len(ranks)))
        places = {rank: place for place, rank in enumerate(ranks)}
        found = [places.get(self._stand_in[rank], -1) for rank in ranks]
        if -1 in found:
            rank = ranks[found.index(-1)]
            raise ValueError(
                f"rank {rank} does not run; rank {self._stand_in[rank]}, which has its role, is not in the group of "
                f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}, which {self._member(ranks)} is in. Choose roles "
                "whose first ranks are in one group wherever members of their roles are."
            )
        return found

    def _member(self, ranks: tuple[int, ...]) -> str:
        running = set(self.running)
        return next((f"rank {rank}" for rank in ranks if rank in running), "nobody that runs")


class Absent:
    """What a member that does not run has part in: it gives what its stand-in gives, and gets nothing."""

    absent = True

    def __init__(self, of: Call) -> None:
        self.op, self.root, self.reduce_op = of.op, of.root, of.reduce_op
        self.inputs, self.in_splits, self.out_splits = of.inputs, of.in_splits, of.out_splits
        self.outputs: list[Any] = []
        self.rank, self.describe = of.rank, of.describe


def counted(calls: list[Any]) -> list[tuple[Any, int]]:
    """The calls of a collective that give something of their own, each with how many members give the same."""
    found: dict[int, list[Any]] = {}
    for call in calls:
        found.setdefault(id(call.inputs), [call, 0])[1] += 1
    return [(call, count) for call, count in found.values()]
