"""The documented instructions and schedule classes of one stage a rank, made from tables.

``schedule.steps()`` yields lists of instructions. Each list is atomic: a barrier may stand between two of them, on all
stages. Sends and receives are blocking and paired within one step, and both sides have them in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from zoo.pipe.lowering import lower
from zoo.pipe.schedules.builder import ScheduleBuilder
from zoo.pipe.schedules.inference import Inference
from zoo.pipe.schedules.one_f_one_b import OneFOneB
from zoo.pipe.schedules.table import Kind, ScheduleError

__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "DataParallelSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
]


class PipeInstruction:
    """One thing that a stage does; keyword arguments are its attributes. Equal if kind and arguments are."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipeInstruction) and (type(self), self.kwargs) == (type(other), other.kwargs)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(self.kwargs.items()))))


class OptimizerStep(PipeInstruction):
    """A step of the optimizer, and gradients are zero again. After ReduceGrads and ReduceTiedGrads."""


class ReduceGrads(PipeInstruction):
    """Reduce the gradients over the data-parallel ranks of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce the gradients of tied weights over the stages that have them."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on one of the stage's buffers.

    Args:
        buffer_id: which one, 0 … ``num_pipe_buffers()`` - 1.
    """

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """The next micro-batch of the data into the buffer: inputs on the first stage, labels on the last."""


class ForwardPass(BufferOpInstruction):
    """The stage's forward of what is in the buffer."""


class BackwardPass(BufferOpInstruction):
    """The backward of the buffer's forward; gradients of weights are added up."""


class SendActivation(BufferOpInstruction):
    """Send the output of the buffer's forward to the next stage, which has a RecvActivation in the same step."""


class RecvActivation(BufferOpInstruction):
    """Receive the input of a forward from the stage before, which has a SendActivation in the same step."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the buffer's input to the stage before, which has a RecvGrad in the same step."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the buffer's output from the next stage, which has a SendGrad in the same step."""


class PipeSchedule(ABC):
    """What one stage does in a batch: iterating yields lists of instructions, each of them one atomic step.

    A schedule of one's own is a subclass with :meth:`steps`; :func:`zoo.pipe.schedules.from_instructions.table_of`
    makes a table of it, which is what is validated, simulated and run.

    Args:
        micro_batches: in a batch.
        stages: of the pipeline.
        stage_id: whose instructions.

    Raises:
        ScheduleError: no such stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if micro_batches < 1 or not 0 <= stage_id < stages:
            raise ScheduleError(
                f"{type(self).__name__} got micro_batches={micro_batches}, stages={stages}, stage_id={stage_id}; it "
                "takes one or more micro-batches, and a stage from 0 to stages - 1."
            )
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of one step after the other."""

    def num_pipe_buffers(self) -> int:
        """Buffers that this stage needs: one a micro-batch, unless a schedule knows better."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """Whose instructions these are."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a batch."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Nobody sends it activations."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """It computes the loss."""
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()


class _FromTable(PipeSchedule):
    """Step t: the transfers at the boundary before slot t, then what the stage computes in slot t."""

    builder: ClassVar[type[ScheduleBuilder]]

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of one slot after the other, with its transfers in front."""
        table = self.builder().build(self.stages, self.micro_batches)
        program = {step.slot: step for step in lower(table)[self.stage_id]}
        for slot in range(table.num_slots):
            step: list[PipeInstruction] = []
            if slot - 1 in program:
                for t in program[slot - 1].transfers:
                    kind = _TRANSFERS[t.sends, t.what]
                    step.append(kind(buffer_id=t.micro_batch % self.num_pipe_buffers()))
            computation = program[slot].computation if slot in program else None
            if computation is not None:
                buffer_id = computation.micro_batch % self.num_pipe_buffers()
                if computation.kind is Kind.FORWARD:
                    if self.is_first_stage or self.is_last_stage:
                        step.append(LoadMicroBatch(buffer_id=buffer_id))
                    step.append(ForwardPass(buffer_id=buffer_id))
                else:
                    step.append(BackwardPass(buffer_id=buffer_id))
            if slot + 1 == table.num_slots and table.trains:
                step += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield step


_TRANSFERS: dict[tuple[bool, str], type[BufferOpInstruction]] = {
    (True, "activation"): SendActivation,
    (False, "activation"): RecvActivation,
    (True, "gradient"): SendGrad,
    (False, "gradient"): RecvGrad,
}


class InferenceSchedule(_FromTable):
    """Forwards only: the table "inference"."""

    builder = Inference

    def num_pipe_buffers(self) -> int:
        """Two: one is sent while the other is computed."""
        return 2


class TrainSchedule(_FromTable):
    """One forward, one backward, in turn: the table "1f1b"."""

    builder = OneFOneB

    def num_pipe_buffers(self) -> int:
        """As many as forwards in flight: stages - stage_id, but no more than micro-batches, and two at least."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class DataParallelSchedule(PipeSchedule):
    """Data parallelism with gradient accumulation: no pipeline."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield a step for each micro-batch; the last one reduces and updates."""
        for m in range(self.micro_batches):
            step: list[PipeInstruction] = [
                LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0), BackwardPass(buffer_id=0),
            ]  # fmt: skip
            if m + 1 == self.micro_batches:
                step += [ReduceGrads(), OptimizerStep()]
            yield step

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1
