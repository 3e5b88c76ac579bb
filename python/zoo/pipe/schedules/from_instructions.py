"""A table from a schedule that was written as instructions, by following its buffers on all stages at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from zoo.pipe.schedules.builder import check_sizes
from zoo.pipe.schedules.instructions import (
    BackwardPass,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from zoo.pipe.schedules.table import Computation, Kind, ScheduleError, Table, looped
from zoo.pipe.validate import check

__all__ = ["FromInstructions", "table_of"]

_ENDS: tuple[type[PipeInstruction], ...] = (ReduceTiedGrads, ReduceGrads, OptimizerStep)
_KNOWN: tuple[type[PipeInstruction], ...] = (
    LoadMicroBatch, ForwardPass, BackwardPass, SendActivation, RecvActivation, SendGrad, RecvGrad, *_ENDS,
)  # fmt: skip


def table_of(schedule: Callable[[int, int, int], PipeSchedule], stages: int, micro_batches: int) -> Table:
    """The table of a user's schedule, one stage a rank.

    All stages are followed step by step, with a barrier after each step and sends that wait for their receives. Which
    micro-batch a buffer holds comes from LoadMicroBatch (the n-th one loads number n) on the first stage and from
    what was sent on the others. Computations keep the order and the steps that they had; transfers are the table's
    own.

    Args:
        schedule: the class, called with (micro_batches, stages, stage_id).
        stages: of the pipeline.
        micro_batches: of a batch.

    Raises:
        ScheduleError: an instruction that is not one of the documented ones, a step in which stages wait for each
        other,
            a buffer that has not what an instruction wants or is overwritten too early, an OptimizerStep that does not
            end the batch; or what :func:`zoo.pipe.validate.validate` does not accept.
    """
    check_sizes(getattr(schedule, "__name__", "schedule"), stages, micro_batches)
    schedules = [schedule(micro_batches, stages, stage) for stage in range(stages)]
    follower = _Follower(schedules)
    return follower.table(getattr(schedule, "__name__", "schedule"))


class FromInstructions:
    """A builder (see :class:`zoo.pipe.schedules.ScheduleBuilder`) from a class of instructions.

    Args:
        schedule: the class, called with (micro_batches, stages, stage_id).
    """

    def __init__(self, schedule: Callable[[int, int, int], PipeSchedule]) -> None:
        self.schedule = schedule

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """One stage a rank."""
        return looped(num_ranks)

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """:func:`table_of`."""
        return table_of(self.schedule, num_ranks, num_micro_batches)


@dataclass
class _Buffer:
    """What a buffer holds: numbers of micro-batches, None for nothing."""

    loaded: int | None = None
    received: int | None = None
    forward: int | None = None
    gradient: int | None = None
    backward: int | None = None
    earliest: int = 0
    """The first slot in which what was received can be used."""
    produced: int = 0
    """The slot in which what can be sent was computed."""


class _Follower:
    def __init__(self, schedules: list[PipeSchedule]) -> None:
        self.stages, self.micro_batches = len(schedules), schedules[0].num_micro_batches
        self.name = type(schedules[0]).__name__
        self.steps = [self._steps_of(schedule) for schedule in schedules]
        self.num_buffers = [self._buffers_of(schedule) for schedule in schedules]
        self.buffers: list[dict[int, _Buffer]] = [{} for _ in schedules]
        self.loads = [0] * self.stages
        self.free = [0] * self.stages
        self.base = 0
        self.found: list[tuple[int, int, Computation]] = []
        everything = [i for steps in self.steps for step in steps for i in step]
        for instruction in everything:
            if isinstance(instruction, BufferOpInstruction) and type(instruction.buffer_id) is not int:
                raise ScheduleError(f"{self.name}: {instruction!r}: a buffer is a number, from 0.")
            if not isinstance(instruction, _KNOWN):
                raise ScheduleError(
                    f"{self.name} has the instruction {type(instruction).__name__}, which is none of "
                    f"{', '.join(known.__name__ for known in _KNOWN)}: a table cannot say it."
                )
        self.trains = any(isinstance(i, BackwardPass) for i in everything)
        self._check_ends()

    def _steps_of(self, schedule: PipeSchedule) -> list[list[PipeInstruction]]:
        most, found = 1000 + 100 * self.stages * self.micro_batches, []
        given: Any = schedule.steps()
        if not isinstance(given, Iterable):
            raise ScheduleError(f"{self.name}: steps() returned {given!r}; it yields a list of instructions a step.")
        for step in given:
            if not isinstance(step, Iterable):
                raise ScheduleError(f"{self.name}: steps() yielded {step!r}; it yields a list of instructions a step.")
            found.append(list(step))
            if len(found) > most:
                raise ScheduleError(
                    f"{self.name}: stage {schedule.stage} has more than {most} steps for {self.micro_batches} "
                    "micro-batches, and may have no end."
                )
        return found

    def _buffers_of(self, schedule: PipeSchedule) -> int:
        number: Any = schedule.num_pipe_buffers()
        if type(number) is not int or number < 0:
            raise ScheduleError(f"{self.name}: num_pipe_buffers() returned {number!r}; it returns a number of buffers.")
        return number

    def fail(self, stage: int, instruction: PipeInstruction, sentence: str) -> ScheduleError:
        return ScheduleError(f"{self.name}: stage {stage}: {instruction!r}: {sentence}")

    def _check_ends(self) -> None:
        # A table ends with the reductions and the optimizer's step; a schedule that has them elsewhere is another one.
        for stage, steps in enumerate(self.steps):
            kinds = [type(i) for step in steps for i in step]
            ends = [kind for kind in kinds if issubclass(kind, _ENDS)]
            places = list(map(_place, ends))
            if self.trains and (places[-1:] != [_place(OptimizerStep)] or len(set(places)) != len(places)):
                raise ScheduleError(
                    f"{self.name}: stage {stage} ends a batch with {[kind.__name__ for kind in ends]}; it takes "
                    "ReduceTiedGrads and ReduceGrads, at most once each, and then OptimizerStep once."
                )
            if (ends and not self.trains) or (ends and kinds[-len(ends) :] != ends):
                raise ScheduleError(
                    f"{self.name}: stage {stage}: {ends[0].__name__} is before the end of the batch, or there is no "
                    "BackwardPass: put the reductions and OptimizerStep after the last BackwardPass and SendGrad."
                )

    def table(self, name: str) -> Table:
        for index in range(max(map(len, self.steps))):
            self._step(index)
            self.base = max(self.free)
        rows: list[list[Computation | None]] = [[None] * max(self.base, 1) for _ in range(self.stages)]
        for stage, slot, c in self.found:
            rows[stage][slot] = c
        table = Table(
            name=name,
            rank_of=tuple(range(self.stages)),
            num_micro_batches=self.micro_batches,
            rows=tuple(map(tuple, rows)),
            trains=self.trains,
        )
        check(table)
        return table

    def _step(self, index: int) -> None:
        """One step of all stages; ends when each is through."""
        left = [list(steps[index]) if index < len(steps) else [] for steps in self.steps]
        while any(left):
            moved = False
            for stage, todo in enumerate(left):
                while todo and self._run(stage, todo[0], left):
                    todo.pop(0)
                    moved = True
            if not moved:
                waits = "; ".join(f"stage {s} in {todo[0]!r}" for s, todo in enumerate(left) if todo)
                raise ScheduleError(f"{self.name}: in step {index} all wait for ever: {waits}.")

    def _run(self, stage: int, instruction: PipeInstruction, left: list[list[PipeInstruction]]) -> bool:
        """Carry out an instruction; False where it has to wait. A receive is carried out by its send."""
        if not isinstance(instruction, BufferOpInstruction):
            return True
        buffer = self._buffer(stage, instruction)
        if isinstance(instruction, LoadMicroBatch):
            self._load(stage, instruction, buffer)
        elif isinstance(instruction, ForwardPass):
            self._forward(stage, instruction, buffer)
        elif isinstance(instruction, BackwardPass):
            self._backward(stage, instruction, buffer)
        elif isinstance(instruction, (SendActivation, SendGrad)):
            return self._send(stage, instruction, buffer, left)
        else:
            return False
        return True

    def _buffer(self, stage: int, instruction: BufferOpInstruction) -> _Buffer:
        number = instruction.buffer_id
        if not 0 <= number < self.num_buffers[stage]:
            raise self.fail(stage, instruction, f"num_pipe_buffers() of this stage is {self.num_buffers[stage]}.")
        return self.buffers[stage].setdefault(number, _Buffer())

    def _in_use(self, stage: int, buffer: _Buffer) -> str | None:
        if buffer.received is not None:
            return f"the activation of micro-batch {buffer.received} in it is not used yet"
        if self.trains and buffer.forward is not None:
            return f"the backward of micro-batch {buffer.forward} in it is not done yet"
        if buffer.backward is not None and stage > 0:
            return f"the gradient of micro-batch {buffer.backward} in it is not sent yet"
        return None

    def _load(self, stage: int, instruction: PipeInstruction, buffer: _Buffer) -> None:
        if self.loads[stage] == self.micro_batches:
            raise self.fail(stage, instruction, f"the batch has {self.micro_batches} micro-batches.")
        if stage == 0 and (why := self._in_use(stage, buffer)):
            raise self.fail(stage, instruction, why + ".")
        buffer.loaded = self.loads[stage]
        self.loads[stage] += 1

    def _compute(self, stage: int, kind: Kind, micro_batch: int, buffer: _Buffer) -> None:
        slot = max(self.free[stage], self.base, buffer.earliest)
        self.found.append((stage, slot, Computation(kind, stage, micro_batch)))
        self.free[stage], buffer.produced = slot + 1, slot

    def _forward(self, stage: int, instruction: PipeInstruction, buffer: _Buffer) -> None:
        micro_batch = buffer.loaded if stage == 0 else buffer.received
        if micro_batch is None:
            raise self.fail(stage, instruction, "there is no micro-batch in this buffer.")
        if buffer.loaded is not None and buffer.loaded != micro_batch:
            raise self.fail(
                stage, instruction, f"its activation is of micro-batch {micro_batch}, its data of {buffer.loaded}."
            )
        if not self.trains and buffer.forward is not None and stage + 1 < self.stages:
            raise self.fail(stage, instruction, f"the output of micro-batch {buffer.forward} in it is not sent yet.")
        self._compute(stage, Kind.FORWARD, micro_batch, buffer)
        buffer.forward, buffer.loaded, buffer.received = micro_batch, None, None

    def _backward(self, stage: int, instruction: PipeInstruction, buffer: _Buffer) -> None:
        if buffer.forward is None:
            raise self.fail(stage, instruction, "there is no forward in this buffer.")
        if stage + 1 < self.stages and buffer.gradient != buffer.forward:
            raise self.fail(
                stage,
                instruction,
                f"its forward is of micro-batch {buffer.forward}, its gradient of {buffer.gradient}.",
            )
        self._compute(stage, Kind.BACKWARD, buffer.forward, buffer)
        buffer.backward, buffer.forward, buffer.gradient = buffer.forward, None, None

    def _send(
        self, stage: int, instruction: BufferOpInstruction, buffer: _Buffer, left: list[list[PipeInstruction]]
    ) -> bool:
        activation = isinstance(instruction, SendActivation)
        peer = stage + 1 if activation else stage - 1
        held = buffer.forward if activation else buffer.backward
        if not 0 <= peer < self.stages:
            raise self.fail(stage, instruction, "there is no such neighbour.")
        if held is None:
            raise self.fail(stage, instruction, "there is nothing of the kind in this buffer.")
        receive = left[peer][0] if left[peer] else None
        if not isinstance(receive, RecvActivation if activation else RecvGrad):
            return False
        target = self._buffer(peer, receive)
        if activation:
            if why := self._in_use(peer, target):
                raise self.fail(peer, receive, why + ".")
            target.received = held
            if not self.trains:
                buffer.forward = None
        else:
            target.gradient, buffer.backward = held, None
        target.earliest = max(target.earliest, buffer.produced + 1)
        left[peer].pop(0)
        return True


def _place(kind: type[PipeInstruction]) -> int:
    return next(i for i, end in enumerate(_ENDS) if issubclass(kind, end))
