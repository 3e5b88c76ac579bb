"""Law 3 on files: save, load, continue equals never stopped, whatever becomes of the mesh (pipeline stages, experts,
data, tensor), the ZeRO stage, the tier and the dtype in between; and the path of resharding does not matter.

A step has the same micro-batches on every mesh. What is compared bit by bit, and what only up to the order of sums:

* every logical tensor in every role, after each of two reshardings in a row: bits;
* the losses of the step after one: bits where each product has the same operands, which is where the experts and the
  matrices are cut as they were; otherwise, in fp64, up to the order of sums;
* all that follows where the third job has the mesh of the first: bits, as if nothing had been in between.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.laws.test_three_axes import NUM_LAYERS, Case, Pipeline
from tests.profiles import examples

from zoo import sim
from zoo.checkpointing import load, save
from zoo.comm import Communicator

NUM_EXPERTS, NUM_MICRO = 4, 4
SMALL = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 2, 1, 1), (2, 1, 1, 2), (1, 2, 1, 2),
         (1, 1, 2, 2), (4, 1, 1, 1), (1, 1, 1, 3), (1, 4, 1, 1), (1, 1, 4, 1)]  # fmt: skip
LARGE = [(2, 2, 2, 1), (2, 2, 1, 2), (1, 2, 2, 2), (4, 2, 1, 1), (2, 4, 1, 1), (2, 1, 2, 3), (2, 2, 2, 2)]
MESHES = SMALL + (LARGE if os.environ.get("ZOO_TEST_PROFILE", "quick") != "quick" else [])
State = dict[tuple[str, str], torch.Tensor]


@dataclass(frozen=True)
class Job:
    """How one job runs the model; ``case`` has the mesh."""

    case: Case
    dtype: torch.dtype = torch.float64
    options: tuple[tuple[str, Any], ...] = ()

    def cut(self) -> tuple[Any, ...]:
        """Those that agree in this multiply the same matrices."""
        return self.dtype, self.case.expert, self.case.tensor


@st.composite
def jobs(draw: st.DrawFn, model: Case, dtypes: tuple[torch.dtype, ...]) -> Job:
    pipe, expert, data, tensor = draw(st.sampled_from(MESHES))
    stage = draw(st.integers(0, 3))
    case = replace(
        model, pipe=pipe, expert=expert, data=data, tensor=tensor, stage=stage, per_rank=NUM_EXPERTS // expert,
        num_micro=NUM_MICRO // (expert * data), reduces_each=draw(st.booleans()),
        bucket_size=draw(st.sampled_from([1, 50, 10**6])), max_bytes=draw(st.sampled_from([None, 0])),
    )  # fmt: skip
    tiers = st.sampled_from(["none", "cpu", "nvme"])
    options: dict[str, Any] = {}
    if stage:
        options["offload_optimizer"] = {"device": draw(tiers), "nvme_path": tempfile.gettempdir()}
    if stage == 3:
        options["offload_param"] = {"device": draw(tiers), "nvme_path": tempfile.gettempdir(), "max_in_cpu": 8}
    return Job(case, draw(st.sampled_from(dtypes)), tuple(options.items()))


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Job, Job, Job]:
    experts_at, pair_at, *_ = draw(st.permutations(range(NUM_LAYERS)))
    tied = draw(st.sampled_from([(), (0, 3), (1, 2)]))
    model = Case(experts_at=experts_at, pair_at=pair_at, tied=tied, clip_norm=draw(st.sampled_from([0.0, 0.5])))
    # The masters of both are fp32: to compute in another dtype for a while changes nothing that is saved.
    dtypes = draw(st.sampled_from([(torch.float64,), (torch.float32, torch.bfloat16)]))
    first, second, third = (draw(jobs(model, dtypes)) for _ in range(3))
    return first, second, third


class Run(Pipeline):
    """A job on one rank, whose replicas share the micro-batches of a step among them."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job.case, rank, job.dtype, optimizer=torch.optim.AdamW, lr=0.01, **dict(job.options))

    def tokens(self, micro: int, step: int) -> torch.Tensor:
        number = self.replica * self.case.num_micro + micro
        generator = torch.Generator().manual_seed(100 * step + number)
        return torch.randn(NUM_EXPERTS, 2, 4, generator=generator, dtype=torch.float64).to(self.dtype)

    def steps(self, steps: range) -> dict[tuple[int, int], float]:
        """Of each step and micro-batch the loss, in the last stage."""
        found = {}
        for step in steps:
            self.step(step)
            for micro, loss in self.losses.items():
                found[step, self.replica * self.case.num_micro + micro] = loss * self.case.num_micro
        return found

    def save(self, root: Path) -> None:
        save(root, "one", self.optimizer.state_slices(), self.optimizer.state_scalars(), comm=Communicator())


def state_in(root: Path) -> tuple[State, dict[str, Any]]:
    """Every logical tensor in every role, and the numbers."""
    with load(root) as found:
        assert [name for name, _ in found.verify()]
        state = {(name, role): found.tensor(name, role) for name in found.shapes for role in found.roles[name]}
        return state, dict(found.scalars)


def same(found: tuple[State, Any], expected: tuple[State, Any]) -> None:
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    for key, value in expected[0].items():
        assert found[0][key].dtype == value.dtype, key
        assert torch.equal(found[0][key], value), key


def job_of(job: Job, steps: tuple[range, range], load_from: Path | None, save_to: Path, end: Path) -> Any:
    """Losses of a job that loads, steps, saves, steps, and saves again."""

    def fn(rank: int) -> dict[tuple[int, int], float]:
        run = Run(job, rank)
        if load_from is not None:
            with load(load_from, comm=Communicator()) as found:
                run.optimizer.load_state(found.read, found.scalars)
        losses = run.steps(steps[0])
        run.save(save_to)
        losses |= run.steps(steps[1])
        run.save(end)
        run.optimizer.close()
        return losses

    losses: dict[tuple[int, int], float] = {}
    for found in sim.run(job.case.world, fn):
        for key, value in found.items():
            assert losses.setdefault(key, value) == value, key  # tensor ranks have the same loss
    return losses


FIRST = Case(pipe=2, expert=2, data=1, tensor=1, pair_at=1, per_rank=2, num_micro=2, stage=3, tied=(0, 3))


@pytest.mark.slow
@examples(times=0.5)
@given(journey=journeys())
@example(
    journey=(
        Job(FIRST, torch.bfloat16, (("offload_optimizer", {"device": "nvme", "nvme_path": tempfile.gettempdir()}),)),
        Job(replace(FIRST, pipe=1, expert=1, tensor=3, per_rank=4, num_micro=4, stage=1), torch.float32),
        Job(replace(FIRST, expert=1, data=2, per_rank=4, stage=0), torch.bfloat16),
    )
)
def test_two_reshardings_in_a_row_change_no_bit_and_the_first_mesh_goes_on(journey: tuple[Job, Job, Job]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        at = [Path(folder) / str(number) for number in range(10)]
        first, second, third = journey
        losses = job_of(first, (range(2), range(2, 4)), None, at[0], at[1])
        saved, ended = state_in(at[0]), state_in(at[1])
        assert len(saved[0]) > 20
        place = at[0]
        for number, job in enumerate((second, third)):
            after, end = at[2 + 2 * number : 4 + 2 * number]
            found = job_of(job, (range(2, 2), range(2, 4)), place, after, end)
            same(state_in(after), saved)
            _compare(first, job, losses, found, ended, state_in(end))
            place = after
        again = job_of(first, (range(2, 2), range(2, 4)), place, at[6], at[7])
        same(state_in(at[6]), saved)
        assert again == {key: loss for key, loss in losses.items() if key[0] >= 2}
        same(state_in(at[7]), ended)


def _compare(first: Job, job: Job, losses: Any, found: Any, ended: Any, end: Any) -> None:
    """A job that goes on where the first one saved."""
    assert found.keys() == {key for key in losses if key[0] >= 2}
    for key, loss in found.items():
        if key[0] == 2 and job.cut() == first.cut():
            assert loss == losses[key], key
        elif job.dtype == torch.float64:
            assert loss == pytest.approx(losses[key], rel=1e-9), key
    if job.dtype == torch.float64:
        for name, value in ended[0].items():
            torch.testing.assert_close(end[0][name], value, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
