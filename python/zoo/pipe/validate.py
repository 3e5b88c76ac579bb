"""Is a set of programs right? Decided from their text alone, without running them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from zoo.pipe.lowering import Program, Step, Transfer, consumer, lower
from zoo.pipe.schedules.table import Computation, Kind, ScheduleError, Table

__all__ = ["Report", "check", "validate"]

Channel = tuple[int, int]
Node = tuple[bool, int, int]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the programs need of each rank.

    Attributes:
        peak_activations: by rank, the most micro-batches · stages whose forward is done and whose backward (W, or B) is
            not; 0 for programs that do not train.
        waiting: by channel (from rank, to rank), the most messages that the receiver has received and not used yet.
    """

    peak_activations: tuple[int, ...]
    waiting: dict[Channel, int]


def check(table: Table, *, max_activations: int | None = None) -> Report:
    """:func:`validate` of the table's own programs."""
    return validate(
        lower(table),
        rank_of=table.rank_of,
        num_micro_batches=table.num_micro_batches,
        trains=table.trains,
        name=table.name,
        max_activations=max_activations,
    )


def validate(
    programs: Sequence[Program],
    *,
    rank_of: Sequence[int],
    num_micro_batches: int,
    trains: bool,
    name: str = "schedule",
    max_activations: int | None = None,
) -> Report:
    """Raise unless the programs compute one batch and come to their end on any machine.

    Right means: every rank computes F, and B or I and then W, of each of its stages for each micro-batch, once; every
    input was received, or computed on the rank itself, in a step before (a step's transfers come after its
    computation); every message is sent once, by who has produced it, to who needs it, and on every channel the k-th
    send and the k-th receive are the same message; and nobody waits for ever if a rank goes on to its next step only
    when every transfer of this one has met its other side (rendezvous, no buffering at all).

    Args:
        programs: one a pipeline rank.
        rank_of: the rank of each stage.
        num_micro_batches: of the batch.
        trains: whether there are backwards.
        name: for errors.
        max_activations: no rank may keep more micro-batches · stages than this.

    Raises:
        ScheduleError: the first thing that is not right, with its rank, slot and computation or message.
    """
    checker = _Check(programs, tuple(rank_of), num_micro_batches, trains, name)
    for rank in range(len(programs)):
        checker.computations(rank)
        checker.messages(rank)
    checker.channels()
    checker.ends()
    report = Report(peak_activations=tuple(map(checker.peak, range(len(programs)))), waiting=checker.waiting())
    for rank, peak in enumerate(report.peak_activations):
        if max_activations is not None and peak > max_activations:
            raise ScheduleError(
                f"{name}: rank {rank} keeps up to {peak} micro-batches of a stage each; the limit is {max_activations}."
            )
    return report


class _Check:
    def __init__(
        self, programs: Sequence[Program], rank_of: tuple[int, ...], num_micro_batches: int, trains: bool, name: str
    ) -> None:
        self.programs, self.rank_of, self.num_micro_batches, self.name = programs, rank_of, num_micro_batches, name
        self.trains, self.num_stages = trains, len(rank_of)
        if not all(0 <= rank < len(programs) for rank in rank_of) or num_micro_batches < 1 or not rank_of:
            raise ScheduleError(
                f"{name}: stages are on the ranks {rank_of}, for {len(programs)} programs and {num_micro_batches} "
                "micro-batches."
            )
        # Of each rank: computation → its step; and where each message came in or went out.
        self.at: list[dict[Computation, int]] = [{} for _ in programs]
        self.moved: list[dict[tuple[bool, str, int, int], int]] = [{} for _ in programs]

    def fail(self, rank: int, step: Step, what: object, sentence: str) -> ScheduleError:
        return ScheduleError(f"{self.name}: rank {rank}, slot {step.slot}: {what}: {sentence}")

    def done(self, rank: int, kinds: tuple[Kind, ...], stage: int, micro_batch: int) -> int | None:
        """The step in which a rank has done one of these, or None."""
        return next(
            (at for k in kinds if (at := self.at[rank].get(Computation(k, stage, micro_batch))) is not None), None
        )

    # -- computations -----------------------------------------------------------------------------------------------

    def computations(self, rank: int) -> None:
        """Each one once, on its rank, after those of the same stage and micro-batch that it goes on from."""
        for index, step in enumerate(self.programs[rank]):
            c = step.computation
            if c is None:
                continue
            inside = 0 <= c.stage < self.num_stages and 0 <= c.micro_batch < self.num_micro_batches
            if not inside or self.rank_of[c.stage] != rank:
                raise self.fail(rank, step, c, "this rank has no such stage, or the batch no such micro-batch.")
            if c.kind is not Kind.FORWARD and not self.trains:
                raise self.fail(rank, step, c, "there are only forwards where nothing is trained.")
            before = {Kind.INPUT: Kind.FORWARD, Kind.BACKWARD: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}.get(c.kind)
            if before is not None and self.done(rank, (before,), c.stage, c.micro_batch) is None:
                raise self.fail(rank, step, c, f"{Computation(before, c.stage, c.micro_batch)} is not done before it.")
            rivals = {Kind.INPUT: (Kind.INPUT, Kind.BACKWARD), Kind.BACKWARD: (Kind.INPUT, Kind.BACKWARD)}
            if self.done(rank, rivals.get(c.kind, (c.kind,)), c.stage, c.micro_batch) is not None:
                raise self.fail(rank, step, c, "it is done twice.")
            self.at[rank][c] = index
        for stage in (s for s, r in enumerate(self.rank_of) if r == rank):
            for m in range(self.num_micro_batches):
                for kinds in ((Kind.FORWARD,), (Kind.BACKWARD, Kind.WEIGHT)) if self.trains else ((Kind.FORWARD,),):
                    if self.done(rank, kinds, stage, m) is None:
                        raise ScheduleError(f"{self.name}: rank {rank} never does {Computation(kinds[0], stage, m)}.")

    # -- messages ---------------------------------------------------------------------------------------------------

    def messages(self, rank: int) -> None:
        """Those that leave were produced; those that come in are needed; and what is needed is there in time."""
        for index, step in enumerate(self.programs[rank]):
            for t in step.transfers:
                self._one(rank, index, step, t)
        for c, index in self.at[rank].items():
            needed = self._input(c)
            if needed is None:
                continue
            what, stage, m = needed
            step = self.programs[rank][index]
            if self.rank_of[stage] == rank:
                kinds = (Kind.FORWARD,) if what == "activation" else (Kind.BACKWARD, Kind.INPUT)
                at = self.done(rank, kinds, stage, m)
                how = f"the {what} of stage {stage}, on the same rank, is not computed before it."
            else:
                at = self.moved[rank].get((False, what, stage, m))
                how = f"the {what} of stage {stage} is not received in a step before it."
            if at is None or at >= index:
                raise self.fail(rank, step, c, how)
        self._all_sent(rank)

    def _input(self, c: Computation) -> tuple[str, int, int] | None:
        """The message, or what takes its place on the same rank, that a computation needs."""
        if c.kind is Kind.FORWARD and c.stage > 0:
            return "activation", c.stage - 1, c.micro_batch
        if c.kind in (Kind.BACKWARD, Kind.INPUT) and c.stage + 1 < self.num_stages:
            return "gradient", c.stage + 1, c.micro_batch
        return None

    def _one(self, rank: int, index: int, step: Step, t: Transfer) -> None:
        key = (t.sends, *t.message)
        if key in self.moved[rank]:
            raise self.fail(rank, step, t, "the same message goes twice.")
        self.moved[rank][key] = index
        other = consumer(t.what, t.stage)
        inside = 0 <= t.stage < self.num_stages and 0 <= other < self.num_stages
        ends = (rank, t.peer) if t.sends else (t.peer, rank)
        if not inside or ends != (self.rank_of[t.stage], self.rank_of[other]) or rank == t.peer:
            raise self.fail(rank, step, t, "this message is not from this rank to that one.")
        if t.sends:
            kinds = (Kind.FORWARD,) if t.what == "activation" else (Kind.BACKWARD, Kind.INPUT)
            at = self.done(rank, kinds, t.stage, t.micro_batch)
            if at is None or at > index:
                raise self.fail(rank, step, t, "it is sent before it is computed.")

    def _all_sent(self, rank: int) -> None:
        for c, index in self.at[rank].items():
            what = {Kind.FORWARD: "activation", Kind.BACKWARD: "gradient", Kind.INPUT: "gradient"}.get(c.kind)
            other = c.stage + (1 if what == "activation" else -1)
            if what is None or not 0 <= other < self.num_stages or self.rank_of[other] == rank:
                continue
            if (True, what, c.stage, c.micro_batch) not in self.moved[rank]:
                raise self.fail(rank, self.programs[rank][index], c, f"its {what} is never sent.")

    # -- between ranks ----------------------------------------------------------------------------------------------

    @cached_property
    def _queues(self) -> dict[Channel, tuple[list[tuple[int, Transfer]], list[tuple[int, Transfer]]]]:
        """Of each channel the sends and the receives in order, each with its step."""
        found: dict[Channel, tuple[list[tuple[int, Transfer]], list[tuple[int, Transfer]]]] = {}
        for rank, program in enumerate(self.programs):
            for index, step in enumerate(program):
                for t in step.transfers:
                    channel = (rank, t.peer) if t.sends else (t.peer, rank)
                    found.setdefault(channel, ([], []))[not t.sends].append((index, t))
        return found

    def channels(self) -> None:
        """The k-th send and the k-th receive of each channel are the same message."""
        for (source, target), (sends, receives) in self._queues.items():
            for sent, received in zip_longest(sends, receives):
                if sent is None or received is None or sent[1].message != received[1].message:
                    rank, (index, t) = (source, sent) if sent is not None else (target, received)
                    meets = "nothing" if sent is None or received is None else f"[{received[1]}] of rank {target}"
                    raise self.fail(rank, self.programs[rank][index], t, f"it meets {meets}.")

    def ends(self) -> None:
        """No circle among the beginnings ("post") and ends ("complete") of batches.

        post(r, i) before complete(r, i) before post(r, i+1); and of a message between (r, i) and (q, j): post(r, i)
        before complete(q, j), post(q, j) before complete(r, i).
        """
        after: dict[Node, list[Node]] = {}
        for rank, program in enumerate(self.programs):
            for i in range(len(program)):
                after.setdefault((False, rank, i), []).append((True, rank, i))
                if i + 1 < len(program):
                    after.setdefault((True, rank, i), []).append((False, rank, i + 1))
        for (source, target), (sends, receives) in self._queues.items():
            for (i, _), (j, _) in zip(sends, receives, strict=True):
                after[False, source, i].append((True, target, j))
                after[False, target, j].append((True, source, i))
        circle = _circle(after)
        if circle is not None:
            waits = [(rank, i) for completes, rank, i in circle if completes]
            told = "; ".join(f"rank {rank} in slot {self.programs[rank][i].slot}" for rank, i in waits[:6])
            more = f" and {len(waits) - 6} more" if len(waits) > 6 else ""
            raise ScheduleError(f"{self.name}: deadlock: these batches of transfers wait for each other: {told}{more}.")

    # -- figures ----------------------------------------------------------------------------------------------------

    def peak(self, rank: int) -> int:
        """The most forwards without their backwards."""
        if not self.trains:
            return 0
        kept = most = 0
        for step in self.programs[rank]:
            if step.computation is not None:
                kept += {Kind.FORWARD: 1, Kind.INPUT: 0}.get(step.computation.kind, -1)
                most = max(most, kept)
        return most

    def waiting(self) -> dict[Channel, int]:
        """The most messages of each channel that are received and not used."""
        users = {self._input(c): (rank, at) for rank, done in enumerate(self.at) for c, at in done.items()}
        found: dict[Channel, int] = {}
        for channel, (_, receives) in self._queues.items():
            changes = [(index, 1) for index, _ in receives] + [(users[t.message][1], -1) for _, t in receives]
            now = most = 0
            for _, change in sorted(changes):  # a step's computation is before its transfers, and -1 sorts before 1
                now += change
                most = max(most, now)
            found[channel] = most
        return found


def _circle(after: dict[Node, list[Node]]) -> list[Node] | None:
    """A circle of the graph, or None: depth first, without recursion."""
    state: dict[Node, int] = {}
    for root in after:
        if root in state:
            continue
        path: list[Node] = [root]
        stack: list[Iterator[Node]] = [iter(after[root])]
        state[root] = 1
        while stack:
            follower = next(stack[-1], None)
            if follower is None:
                state[path.pop()] = 2
                stack.pop()
            elif state.get(follower) == 1:
                return path[path.index(follower) :]
            elif follower not in state:
                state[follower] = 1
                path.append(follower)
                stack.append(iter(after.get(follower, ())))
    return None
