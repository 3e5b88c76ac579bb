"""The documented instructions and schedule classes, and tables of a user's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.pipe import ScheduleError, build, check
from zoo.pipe.schedules.from_instructions import table_of
from zoo.pipe.schedules.instructions import (
    BackwardPass,
    BufferOpInstruction,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
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
    TrainSchedule,
)


def test_instructions_keep_their_arguments() -> None:
    instruction = ForwardPass(buffer_id=3, chunk="a")
    assert (instruction.buffer_id, instruction.chunk) == (3, "a")  # type: ignore[attr-defined]
    assert instruction == ForwardPass(3, chunk="a") != BackwardPass(3, chunk="a")
    assert repr(instruction) == "ForwardPass(buffer_id=3, chunk='a')"
    assert len({ForwardPass(1), ForwardPass(1), ForwardPass(2), OptimizerStep(), OptimizerStep()}) == 3
    assert isinstance(instruction, BufferOpInstruction)
    assert not isinstance(ReduceGrads(), BufferOpInstruction)


def test_a_schedule_knows_its_place() -> None:
    first, last = TrainSchedule(4, 3, 0), TrainSchedule(micro_batches=4, stages=3, stage_id=2)
    assert (first.stage, first.num_stages, first.num_micro_batches) == (0, 3, 4)
    assert (first.is_first_stage, first.is_last_stage) == (True, False)
    assert (last.is_first_stage, last.is_last_stage) == (False, True)
    assert (last.prev_stage, last.next_stage) == (1, 3)
    with pytest.raises(ScheduleError, match="stage_id=3"):
        TrainSchedule(4, 3, 3)
    with pytest.raises(TypeError):
        PipeSchedule(1, 1, 0)  # type: ignore[abstract]


def test_train_schedule_of_two_stages() -> None:
    load, forward, backward = LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)
    assert list(TrainSchedule(1, 2, 0)) == [
        [load, forward], [SendActivation(0)], [], [RecvGrad(0), backward, ReduceTiedGrads(), ReduceGrads(),
        OptimizerStep()],
    ]  # fmt: skip
    assert list(TrainSchedule(1, 2, 1)) == [
        [], [RecvActivation(0), load, forward], [backward],
        [SendGrad(0), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()],
    ]  # fmt: skip


def test_the_documented_data_parallel_example() -> None:
    cmd = [LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0), BackwardPass(buffer_id=0)]
    assert list(DataParallelSchedule(2, 1, 0)) == [cmd, [*cmd, ReduceGrads(), OptimizerStep()]]
    assert DataParallelSchedule(2, 1, 0).num_pipe_buffers() == 1


def test_buffers_are_as_documented() -> None:
    assert [TrainSchedule(8, 4, s).num_pipe_buffers() for s in range(4)] == [4, 3, 2, 2]
    assert [TrainSchedule(3, 8, s).num_pipe_buffers() for s in range(8)] == [3, 3, 3, 3, 3, 3, 2, 2]
    assert InferenceSchedule(8, 4, 1).num_pipe_buffers() == 2


@examples(times=3)
@given(stages=st.integers(1, 9), micro_batches=st.integers(1, 20))
def test_following_the_instructions_gives_the_table_that_they_came_from(stages: int, micro_batches: int) -> None:
    # table_of puts a barrier after each step, lets a send wait for its receive and sees that no buffer is overwritten.
    for schedule, name in ((TrainSchedule, "1f1b"), (InferenceSchedule, "inference")):
        assert table_of(schedule, stages, micro_batches).rows == build(name, stages, micro_batches).rows
        lengths = {len(list(schedule(micro_batches, stages, s))) for s in range(stages)}
        assert len(lengths) == 1, "every stage has every barrier"
    assert table_of(DataParallelSchedule, 1, micro_batches).rows == build("data_parallel", 1, micro_batches).rows


@pytest.mark.slow
def test_following_the_instructions_of_many_sizes() -> None:
    for stages in range(1, 17):
        for micro_batches in (*range(1, 18), 31, 32, 64):
            for schedule, name in ((TrainSchedule, "1f1b"), (InferenceSchedule, "inference")):
                assert table_of(schedule, stages, micro_batches).rows == build(name, stages, micro_batches).rows


class FillDrain(PipeSchedule):
    """As a user would write GPipe: transfers in the step of the computation."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        last, M = self.stages - 1, self.micro_batches
        for t in range(2 * (M + last)):
            m, back = t - self.stage_id, t - (M + last) - (last - self.stage_id)
            cmds: list[PipeInstruction] = []
            if 0 <= m < M:
                cmds.append(LoadMicroBatch(m) if self.is_first_stage else RecvActivation(m))
                cmds.append(ForwardPass(m))
            if 0 <= m - 1 < M and not self.is_last_stage:
                cmds.append(SendActivation(m - 1))
            if 0 <= back - 1 < M and not self.is_first_stage:
                cmds.append(SendGrad(back - 1))
            if 0 <= back < M:
                cmds += [*([] if self.is_last_stage else [RecvGrad(back)]), BackwardPass(back)]
            yield cmds
        yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


def test_a_users_schedule_becomes_a_table() -> None:
    class Sequential(FillDrain):
        """One micro-batch after the other, several transfers and computations a step."""

        def steps(self) -> Iterator[list[PipeInstruction]]:
            for m in range(self.micro_batches):
                yield [
                    LoadMicroBatch(0) if self.is_first_stage else RecvActivation(0),
                    ForwardPass(0),
                    *([] if self.is_last_stage else [SendActivation(0), RecvGrad(0)]),
                    BackwardPass(0),
                    *([] if self.is_first_stage else [SendGrad(0)]),
                    *([OptimizerStep()] if m + 1 == self.micro_batches else []),
                ]

        def num_pipe_buffers(self) -> int:
            return 1

    table = table_of(Sequential, 3, 2)
    assert table.name == "Sequential"
    assert str(table).splitlines()[1:] == [
        "rank 0  0F0                 0B0 0F1                 0B1",
        "rank 1      1F0         1B0         1F1         1B1",
        "rank 2          2F0 2B0                 2F1 2B1",
    ]


def test_gpipe_as_a_user_writes_it() -> None:
    assert check(table_of(FillDrain, 3, 4)).peak_activations == (4, 4, 4)


class OneStage(PipeSchedule):
    cmds: tuple[PipeInstruction, ...] = ()

    def steps(self) -> Iterator[list[PipeInstruction]]:
        yield list(self.cmds)

    def num_pipe_buffers(self) -> int:
        return 1


class Offload(PipeInstruction):
    pass


LOAD, FORWARD, BACKWARD, END = LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), OptimizerStep()


@pytest.mark.parametrize(
    ("cmds", "said"),
    [
        ((LOAD, FORWARD, Offload(), BACKWARD, END), "instruction Offload, which is none of LoadMicroBatch"),
        ((FORWARD, BACKWARD, END), "no micro-batch in this buffer"),
        ((LOAD, BACKWARD, END), "no forward in this buffer"),
        ((LOAD, FORWARD, BACKWARD), "OptimizerStep once"),
        ((LOAD, FORWARD, END, BACKWARD), "before the end of the batch"),
        ((LOAD, FORWARD, BACKWARD, END, ReduceGrads()), "OptimizerStep once"),
        ((LOAD, FORWARD, BACKWARD, END, END), "OptimizerStep once"),
        ((LOAD, FORWARD, END), "no BackwardPass"),
        ((LOAD, FORWARD, SendActivation(0)), "no such neighbour"),
        ((LOAD, FORWARD, RecvGrad(0)), "wait for ever: stage 0 in RecvGrad"),
        ((LOAD, LOAD, FORWARD), "1 micro-batches"),
        ((LoadMicroBatch(1),), "num_pipe_buffers"),
        ((LOAD,), "never does 0F0"),
        ((LOAD, FORWARD, BACKWARD, BACKWARD, END), "no forward"),
    ],
)
def test_instructions_that_are_no_schedule(cmds: Any, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        table_of(type("Mine", (OneStage,), {"cmds": cmds}), 1, 1)


def returning(steps: Any, buffers: Any = 1) -> Any:
    return type("Mine", (OneStage,), {"steps": lambda self: steps, "num_pipe_buffers": lambda self: buffers})


@pytest.mark.parametrize(
    ("schedule", "stages", "said"),
    [
        (returning(None), 1, r"steps\(\) returned None; it yields a list"),
        (returning([LOAD]), 1, r"steps\(\) yielded LoadMicroBatch\(buffer_id=0\); it yields a list"),
        (returning([[LoadMicroBatch("a")]]), 1, r"LoadMicroBatch\(buffer_id='a'\): a buffer is a number"),  # type: ignore[arg-type]
        (returning([[LOAD]], None), 1, r"num_pipe_buffers\(\) returned None"),
        (returning(itertools.repeat([])), 1, "more than 1100 steps .* may have no end"),
        (TrainSchedule, 0, "0 ranks and 1 micro-batches; it takes one or more of both"),
    ],
)
def test_schedules_that_yield_no_steps_of_instructions(schedule: Any, stages: int, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        table_of(schedule, stages, 1)


def test_an_instruction_of_ones_own_kind_is_what_it_is_derived_from() -> None:
    class Step(OptimizerStep):
        pass

    cmds = (LOAD, FORWARD, BACKWARD, Step())
    assert str(table_of(type("Mine", (OneStage,), {"cmds": cmds}), 1, 1)).endswith("rank 0  0F0 0B0")


def test_an_input_may_come_before_the_last_output_has_gone() -> None:
    class OneBuffer(PipeSchedule):
        """Inference with one buffer: its input and its output are two things."""

        forgets = False

        def steps(self) -> Iterator[list[PipeInstruction]]:
            for t in range(self.micro_batches + self.stages):
                m, cmds = t - self.stage_id, list[PipeInstruction]()
                if 0 <= m < self.micro_batches:
                    cmds.append(LoadMicroBatch(0) if self.is_first_stage else RecvActivation(0))
                if 0 <= m - 1 < self.micro_batches and not self.is_last_stage and not (self.forgets and m == 1):
                    cmds.append(SendActivation(0))
                yield [*cmds, *([ForwardPass(0)] if 0 <= m < self.micro_batches else [])]

        def num_pipe_buffers(self) -> int:
            return 1

    assert table_of(OneBuffer, 3, 4).rows == build("inference", 3, 4).rows
    with pytest.raises(
        ScheduleError, match=r"stage 0: .*ForwardPass.* the output of micro-batch 0 in it is not sent yet"
    ):
        table_of(type("Mine", (OneBuffer,), {"forgets": True}), 2, 3)


def test_buffers_that_are_overwritten_and_messages_that_are_mixed_up() -> None:
    class TooFew(TrainSchedule):
        def num_pipe_buffers(self) -> int:
            return 1

    with pytest.raises(ScheduleError, match="backward of micro-batch 0 in it is not done yet"):
        table_of(TooFew, 2, 2)

    class Crossed(FillDrain):
        def steps(self) -> Iterator[list[PipeInstruction]]:
            turned = {0: 1, 1: 0}
            for step in super().steps():
                yield [RecvGrad(turned[i.buffer_id]) if isinstance(i, RecvGrad) else i for i in step]

    with pytest.raises(ScheduleError, match="forward is of micro-batch 0, its gradient of None"):
        table_of(Crossed, 2, 2)
    with pytest.raises(ScheduleError, match="its gradient of None"):
        table_of(DataParallelSchedule, 2, 1)
