"""From what each rank computes one after the other, or from a rule that picks the next, to slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zoo.pipe.schedules.table import Computation, Kind, ScheduleError, Table

__all__ = ["Progress", "needs", "place", "place_by_rule"]

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


def needs(c: Computation, num_stages: int) -> Iterator[tuple[Computation, ...]]:
    """What must be done before ``c``: of each tuple one. B of a stage serves whoever waits for its I."""
    stage, m = c.stage, c.micro_batch
    if c.kind is F:
        if stage > 0:
            yield (Computation(F, stage - 1, m),)
    elif c.kind is W:
        yield (Computation(I, stage, m),)
    else:
        yield (Computation(F, stage, m),)
        if stage + 1 < num_stages:
            yield Computation(I, stage + 1, m), Computation(B, stage + 1, m)


class Progress:
    """What is done when a slot begins: asked by the rules of :func:`place_by_rule`."""

    def __init__(self, rank_of: Sequence[int], num_micro_batches: int) -> None:
        self.rank_of, self.num_stages, self.num_micro_batches = tuple(rank_of), len(rank_of), num_micro_batches
        self.slot = 0
        self.done: dict[Computation, int] = {}
        """Computation → its slot."""
        self._next = {(kind, stage): 0 for kind in Kind for stage in range(self.num_stages)}

    def count(self, kind: Kind, stage: int) -> int:
        """How many of a kind this stage has done; they are done in the order of the micro-batches."""
        return self._next[kind, stage]

    def ready(self, c: Computation) -> bool:
        """All that ``c`` needs was done in slots before this one."""
        return all(
            any(self.done.get(one, self.slot) < self.slot for one in alternatives)
            for alternatives in needs(c, self.num_stages)
        )

    def next_of(self, kind: Kind, stage: int) -> Computation | None:
        """The next micro-batch's computation of this kind and stage if it could run now, else None."""
        micro_batch = self._next[kind, stage]
        if micro_batch == self.num_micro_batches:
            return None
        c = Computation(kind, stage, micro_batch)
        return c if self.ready(c) else None

    def _record(self, c: Computation) -> None:
        self.done[c] = self.slot
        self._next[c.kind, c.stage] += 1


def place(
    name: str,
    orders: Sequence[Sequence[Computation]],
    rank_of: Sequence[int],
    num_micro_batches: int,
    *,
    trains: bool = True,
) -> Table:
    """Each computation in the first slot after the one before it in its rank's order and after all that it needs.

    Raises:
        ScheduleError: the orders wait for each other in a circle, or for what nobody computes.
    """
    progress, at = Progress(rank_of, num_micro_batches), [0] * len(orders)
    rows: list[list[Computation | None]] = [[] for _ in orders]
    while any(i < len(order) for i, order in zip(at, orders, strict=True)):
        heads = [order[i] if i < len(order) else None for i, order in zip(at, orders, strict=True)]
        run = [c if c is not None and progress.ready(c) else None for c in heads]
        if not any(run):
            stuck = next((r, c) for r, c in enumerate(heads) if c is not None)
            raise ScheduleError(
                f"{name}: rank {stuck[0]} waits for ever before {stuck[1]}: what it needs is never done."
            )
        for rank, c in enumerate(run):
            rows[rank].append(c)
            if c is not None:
                progress._record(c)
                at[rank] += 1
        progress.slot += 1
    return _table(name, rows, rank_of, num_micro_batches, trains)


def place_by_rule(
    name: str,
    rank_of: Sequence[int],
    num_micro_batches: int,
    rule: Callable[[int, Progress], Computation | None],
    *,
    num_computations: int,
) -> Table:
    """Slot by slot, what ``rule(rank, progress)`` picks for each rank, until so many computations are done.

    Raises:
        ScheduleError: no rank has anything to do, and something is left.
    """
    progress = Progress(rank_of, num_micro_batches)
    rows: list[list[Computation | None]] = [[] for _ in range(max(rank_of) + 1)]
    while len(progress.done) < num_computations:
        run = [rule(rank, progress) for rank in range(len(rows))]
        if not any(run):
            raise ScheduleError(
                f"{name}: after {len(progress.done)} of {num_computations} computations nobody goes on."
            )
        for rank, c in enumerate(run):
            rows[rank].append(c)
            if c is not None:
                progress._record(c)
        progress.slot += 1
    return _table(name, rows, rank_of, num_micro_batches, True)


def _table(
    name: str,
    rows: Sequence[Sequence[Computation | None]],
    rank_of: Sequence[int],
    num_micro_batches: int,
    trains: bool,
) -> Table:
    return Table(
        name=name,
        rank_of=tuple(rank_of),
        num_micro_batches=num_micro_batches,
        rows=tuple(map(tuple, rows)),
        trains=trains,
    )
