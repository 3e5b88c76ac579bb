"""Runs programs with symbols in the place of tensors and sees what comes of it: a second opinion to the validator's."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zoo.pipe.lowering import Program, Transfer
from zoo.pipe.schedules.table import Computation, Kind

__all__ = ["Outcome", "Verdict", "interpret"]

_Posted: TypeAlias = dict[tuple[int, int], tuple[deque[tuple[int, Transfer]], deque[tuple[int, Transfer]]]]
"""By channel (from rank, to rank): sends and receives that have not met yet, each with the rank that posted it."""


class Outcome(enum.Enum):
    """How a run ended."""

    DONE = "done"
    DEADLOCK = "deadlock"
    WRONG = "wrong"


@dataclass(frozen=True)
class Verdict:
    """The end of a run, and for the other two than DONE a sentence: who waits for whom, or what is wrong where."""

    outcome: Outcome
    reason: str = ""


class _WrongError(Exception):
    pass


def interpret(programs: Sequence[Program], *, rank_of: Sequence[int], num_micro_batches: int, trains: bool) -> Verdict:
    """Run the programs; a rank leaves a step when all of its transfers have met their other sides.

    A value is a number that depends on everything that went into it: F of stage s for micro-batch m makes
    hash(s, m, value that came in), I makes the hash of what F kept and the gradient that came in, W and B add to the
    weights' gradient. Values move: what is sent or used is not there any more, and at the end nothing may be left over.
    What the values must be is computed by the plain loops of one process.
    """
    machine = _Machine(programs, tuple(rank_of), num_micro_batches, trains)
    try:
        stuck = machine.run()
        if stuck:
            return Verdict(Outcome.DEADLOCK, stuck)
        machine.check_end()
    except _WrongError as wrong:
        return Verdict(Outcome.WRONG, str(wrong))
    return Verdict(Outcome.DONE)


class _Rank:
    """The memory of one rank."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.came_in: dict[tuple[str, int, int], int] = {}
        self.to_go_out: dict[tuple[str, int, int], int] = {}
        self.under_way: dict[tuple[str, int, int], int] = {}
        """Posted, and the other side has not."""
        self.kept: dict[tuple[int, int], int] = {}
        self.between: dict[tuple[int, int], int] = {}
        """What I leaves for W."""
        self.outputs: dict[tuple[int, int], int] = {}
        self.gradients: dict[int, list[int]] = {stage: [] for stage in stages}


class _Machine:
    def __init__(
        self, programs: Sequence[Program], rank_of: tuple[int, ...], num_micro_batches: int, trains: bool
    ) -> None:
        self.programs, self.rank_of, self.num_micro_batches, self.trains = programs, rank_of, num_micro_batches, trains
        self.last = len(rank_of) - 1
        self.ranks = [_Rank([s for s, on in enumerate(rank_of) if on == r]) for r in range(len(programs))]
        self.expected = _one_process(len(rank_of), num_micro_batches)

    def run(self) -> str:
        """Returns who waits for whom, "" when all ranks are through."""
        at, open_ = [-1] * len(self.programs), [0] * len(self.programs)
        posted: _Posted = {}
        runnable = deque(range(len(self.programs)))
        while runnable:
            rank = runnable.popleft()
            while open_[rank] == 0 and at[rank] < len(self.programs[rank]):
                at[rank] += 1
                if at[rank] == len(self.programs[rank]):
                    break
                step = self.programs[rank][at[rank]]
                if step.computation is not None:
                    self._compute(rank, step.computation)
                open_[rank] = len(step.transfers)
                for t in step.transfers:
                    channel = (rank, t.peer) if t.sends else (t.peer, rank)
                    queues = posted.setdefault(channel, (deque(), deque()))
                    queues[0 if t.sends else 1].append((rank, t))
                    if t.sends:
                        self._leave(rank, t)
                    while queues[0] and queues[1]:
                        (source, sent), (target, received) = queues[0].popleft(), queues[1].popleft()
                        self._arrive(target, received, self.ranks[source].under_way.pop(sent.message))
                        for side in (source, target):
                            open_[side] -= 1
                            if side != rank and open_[side] == 0:
                                runnable.append(side)
        waiting = [f"rank {r} waits for {self._missing(r, posted)}" for r, left in enumerate(open_) if left]
        return "; ".join(waiting)

    def _missing(self, rank: int, posted: _Posted) -> str:
        return ", ".join(
            sorted({f"rank {t.peer}" for queues in posted.values() for queue in queues for r, t in queue if r == rank})
        )

    def _leave(self, rank: int, t: Transfer) -> None:
        memory = self.ranks[rank]
        if t.message not in memory.to_go_out:
            raise _WrongError(f"rank {rank}: {t}: there is nothing of the kind to send")
        memory.under_way[t.message] = memory.to_go_out.pop(t.message)

    def _arrive(self, rank: int, t: Transfer, value: int) -> None:
        if t.message in self.ranks[rank].came_in:
            raise _WrongError(f"rank {rank}: {t}: it is there already")
        self.ranks[rank].came_in[t.message] = value

    def _compute(self, rank: int, c: Computation) -> None:
        memory, key = self.ranks[rank], (c.stage, c.micro_batch)
        if c.stage not in memory.gradients or not 0 <= c.micro_batch < self.num_micro_batches:
            raise _WrongError(f"rank {rank}: {c}: no such stage or micro-batch here")
        if c.kind is Kind.FORWARD:
            value = 0 if c.stage == 0 else self._input(rank, c, ("activation", c.stage - 1, c.micro_batch))
            if key in memory.outputs:
                raise _WrongError(f"rank {rank}: {c}: done before")
            memory.outputs[key] = out = hash((1, *key, value))
            self._put(rank, ("activation", *key), out, c.stage + 1)
            if self.trains:
                memory.kept[key] = out
            return
        if c.kind in (Kind.INPUT, Kind.BACKWARD):
            if key not in memory.kept:
                raise _WrongError(f"rank {rank}: {c}: no forward that this could go back through")
            value = 0 if c.stage == self.last else self._input(rank, c, ("gradient", c.stage + 1, c.micro_batch))
            memory.between[key] = back = hash((2, memory.kept.pop(key), value))
            self._put(rank, ("gradient", *key), back, c.stage - 1)
        if c.kind in (Kind.WEIGHT, Kind.BACKWARD):
            if key not in memory.between:
                raise _WrongError(f"rank {rank}: {c}: no input gradient before it")
            memory.gradients[c.stage].append(memory.between.pop(key))

    def _input(self, rank: int, c: Computation, message: tuple[str, int, int]) -> int:
        if message not in self.ranks[rank].came_in:
            raise _WrongError(f"rank {rank}: {c}: {message[0]} of stage {message[1]} is not there")
        return self.ranks[rank].came_in.pop(message)

    def _put(self, rank: int, message: tuple[str, int, int], value: int, stage: int) -> None:
        if 0 <= stage <= self.last:
            memory = self.ranks[rank]
            (memory.came_in if self.rank_of[stage] == rank else memory.to_go_out)[message] = value

    def check_end(self) -> None:
        """Everything computed, with the values of one process; nothing left over."""
        outputs, gradients = self.expected
        for rank, memory in enumerate(self.ranks):
            left = [*memory.came_in, *memory.to_go_out, *memory.kept, *memory.between]
            if left:
                raise _WrongError(f"rank {rank}: left over at the end: {left[0]}")
            for stage, found in memory.gradients.items():
                ours = sorted(value for (s, _), value in memory.outputs.items() if s == stage)
                if ours != sorted(outputs[stage]) or sorted(found) != (sorted(gradients[stage]) if self.trains else []):
                    raise _WrongError(f"rank {rank}: stage {stage} has computed other values than one process")


def _one_process(num_stages: int, num_micro_batches: int) -> tuple[list[list[int]], list[list[int]]]:
    outputs: list[list[int]] = [[] for _ in range(num_stages)]
    gradients: list[list[int]] = [[] for _ in range(num_stages)]
    for m in range(num_micro_batches):
        value = 0
        for stage in range(num_stages):
            value = hash((1, stage, m, value))
            outputs[stage].append(value)
        value = 0
        for stage in reversed(range(num_stages)):
            value = hash((2, outputs[stage][m], value))
            gradients[stage].append(value)
    return outputs, gradients
