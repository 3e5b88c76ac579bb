"""Faults that ``run`` can inject. Operations of a rank are counted from 0, in the order in which it issues them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Crash", "Delay", "Fault"]


@dataclass(frozen=True, kw_only=True)
class Crash:
    """Rank ``rank`` dies where it would issue its communication operation number ``at`` (from 0).

    The operation is not issued. From then on every operation that needs the dead rank and is not yet complete on all
    sides fails in the survivors with ``PeerLostError``; groups without the dead rank go on as before. An operation
    that all its participants had issued before the death may still complete. A rank that issues fewer operations
    than ``at + 1`` does not crash; look for the ``Crash`` object in the results to be sure that it did.
    """

    rank: int
    at: int


@dataclass(frozen=True, kw_only=True)
class Delay:
    """The operation number ``at`` (from 0) of rank ``rank`` completes at least ``by`` scheduling steps after it could.

    A delay never makes a deadlock: when nothing else can happen the clock jumps forward.
    """

    rank: int
    at: int
    by: int


Fault = Crash | Delay


class FaultPlan:
    """The faults of one run, looked up by rank and operation number."""

    def __init__(self, faults: Iterable[Fault], world_size: int, running: Sequence[int]) -> None:
        self._running = running
        self.crashes: dict[int, Crash] = {}
        self.delays: dict[tuple[int, int], int] = {}
        for fault in faults:
            self._add(fault, world_size)

    def _add(self, fault: Fault, world_size: int) -> None:
        if not isinstance(fault, (Crash, Delay)):
            raise ValueError(f"faults holds {fault!r}; allowed are Crash(rank=, at=) and Delay(rank=, at=, by=)")
        if not 0 <= fault.rank < world_size:
            raise ValueError(
                f"{fault!r} names rank {fault.rank}, but the ranks of this run are 0 to {world_size - 1}; "
                "name one of them or run with more ranks"
            )
        if len(self._running) < world_size and fault.rank not in self._running:
            raise ValueError(
                f"{fault!r} names rank {fault.rank}, in whose place another rank of its role runs; name one of "
                f"{list(self._running)[:9]}, or run all ranks"
            )
        if fault.at < 0:
            raise ValueError(f"{fault!r}: at is {fault.at}, but operations are counted from 0; give at >= 0")
        if isinstance(fault, Crash):
            if fault.rank in self.crashes:
                raise ValueError(
                    f"{fault!r} and {self.crashes[fault.rank]!r}: a rank dies only once; give one Crash for each rank"
                )
            self.crashes[fault.rank] = fault
            return
        if fault.by < 0:
            raise ValueError(f"{fault!r}: by is {fault.by} scheduling steps; give by >= 0")
        key = (fault.rank, fault.at)
        self.delays[key] = self.delays.get(key, 0) + fault.by
