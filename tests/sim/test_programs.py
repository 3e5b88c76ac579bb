"""Programs of a run: what ranks compute, begin and wait for, whatever the seed; with times of a machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo import sim
from zoo.cost import product_s, read_hardware
from zoo.cost.events import Compute, Start, Wait, cost_on, simulate_events
from zoo.zero import ZeroOptimizer


def busy(rank: int) -> None:
    x = torch.ones(250)
    sim.compute(1.0 + rank, "work")
    work = dist.all_reduce(x, async_op=True)
    sim.compute(0.25, "more")
    sim.compute(0.25, "more")
    assert work is not None
    work.wait()
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)


@given(seed=st.integers(0, 50), semantics=st.sampled_from(["gloo", "nccl"]))
def test_a_program_is_what_the_rank_did(seed: int, semantics: str) -> None:
    programs = sim.Programs()
    sim.run(3, busy, seed=seed, semantics=semantics, programs=programs)
    of_two = programs.programs()[2]
    kinds = [type(item) for item in of_two]
    assert kinds == [Compute, Start, Compute, Wait]
    assert of_two[0] == Compute(3.0, "work")
    assert of_two[2] == Compute(0.5, "more")
    assert isinstance(of_two[1], Start)
    assert (of_two[1].op, of_two[1].members, of_two[1].num_bytes) == ("all_reduce", (0, 1, 2), 1000)
    found = simulate_events(programs.programs(), lambda start: 2.0)
    assert found.ends_s == (7.0, 7.0, 5.0)
    assert found.exposed_s[0] == {"all_reduce": 3.5, "send": 2.0}
    assert found.critical_s() == {"work": 3.0, "all_reduce": 2.0, "send": 2.0}
    late = simulate_events(programs.programs(), lambda start: 0.0, slower={1: 10.0})
    assert late.makespan_s == 25.0


def test_messages_that_cross_do_not_wait_for_each_other() -> None:
    def fn(rank: int) -> None:
        given, got = torch.ones(4), torch.empty(4)
        work = dist.isend(given, 1 - rank)
        dist.recv(got, 1 - rank)
        assert work is not None
        work.wait()

    programs = sim.Programs()
    sim.run(2, fn, programs=programs)
    assert simulate_events(programs.programs(), lambda start: 1.0).makespan_s == 1.0


def test_products_and_passes_cost_what_a_device_takes() -> None:
    device = read_hardware("a100-80").device
    a, b = torch.ones(64, 96, requires_grad=True), torch.ones(96, 32)

    def fn(rank: int) -> None:
        with sim.costing(device):
            (a @ b).backward(torch.ones(64, 32))

    programs = sim.Programs()
    sim.run(1, fn, programs=programs)
    (program,) = programs.programs()
    taken = sum(item.seconds for item in program if isinstance(item, Compute))
    products = product_s(device, 64, 32, 96, itemsize=4) + product_s(device, 64, 96, 32, itemsize=4)
    assert taken >= products
    assert taken == pytest.approx(products, rel=0.3)
    with sim.costing(device):  # outside of a run nothing is told
        a @ b


class Stack(nn.Module):
    """Layers that take a while, told as seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            sim.compute(self.seconds, "forward")
            x = _Back.apply(layer(x), 2 * self.seconds)
        return x


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        sim.compute(ctx.seconds, "backward")
        return gradients[0], None


def train(stage: int, ranks: int, seed: int = 0) -> sim.Programs:
    programs = sim.Programs()

    def fn(rank: int) -> None:
        model = Stack(seconds=1.0)
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1
        )
        for step in range(2):
            sim.compute(1e-9, f"step {step}")
            optimizer.backward(model(torch.ones(2, 64) * rank).sum())
            optimizer.step()
            optimizer.zero_grad()

    sim.run(ranks, fn, seed=seed, programs=programs)
    return programs


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_runtime_hides_communication_that_is_shorter_than_its_layers(stage: int) -> None:
    programs = train(stage, 3).programs()
    computed = 2 * 6 * 3.0
    free = simulate_events(programs, lambda start: 0.0)
    assert free.makespan_s == pytest.approx(computed)
    # Of collectives of half a layer, the second step hides all but the first gather and the last two reductions (stage
    # 3), or the last two reductions and the step's gathers (below).
    half = simulate_events(programs, lambda start: 0.5 if start.num_bytes > 500 else 0.0)
    second = next(s.start_s for s in half.spans if s.rank == 0 and s.name == "step 1")
    exposed = half.makespan_s - second - computed / 2
    assert exposed == pytest.approx({3: 1.5, 2: 4.0, 0: 4.0}[stage], abs=1e-6)
    slow = simulate_events(programs, lambda start: 50.0 if start.num_bytes > 500 else 0.0)
    assert slow.makespan_s > computed + 2 * 200.0
    assert max(slow.critical_s(), key=lambda name: slow.critical_s()[name]) != "forward"


def test_time_does_not_depend_on_the_seed_of_the_run() -> None:
    cost = cost_on(read_hardware("a100-80"))
    found = {simulate_events(train(3, 2, seed).programs(), cost).ends_s for seed in range(3)}
    assert len(found) == 1


def test_measured_programs_tell_what_python_took() -> None:
    def fn(rank: int) -> None:
        x = torch.ones(300, 300)
        for _ in range(20):
            x = x @ x / 300
        dist.all_reduce(x)

    programs = sim.Programs(measured=True)
    sim.run(2, fn, programs=programs)
    for program in programs.programs():
        assert sum(item.seconds for item in program if isinstance(item, Compute)) > 1e-4
