"""Programs of a run: what ranks compute, begin and wait for, whatever the seed; with times of a machine."""

from __future__ import annotations

import benchmarks.sim.job as job
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from zoo import sim
from zoo.cost import read_hardware
from zoo.cost.events import Compute, Start, Wait, cost_on, simulate_events


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


@pytest.mark.parametrize("root", [0, 3])
def test_what_a_root_or_one_of_all_sends_or_gets_takes_its_time(root: int) -> None:
    """Three parts leave a root that scatters and come to one that gathers; so with all to all."""
    machine, part, size = read_hardware("h100"), torch.zeros(1 << 22), 4

    def scatter(rank: int) -> None:
        dist.scatter(torch.empty_like(part), [part] * size if rank == root else None, src=root)

    def gather(rank: int) -> None:
        dist.gather(part, [torch.empty_like(part) for _ in range(size)] if rank == root else None, dst=root)

    def to_one(rank: int) -> None:
        gets = [part.numel() if rank == root else 0] * size
        gives = [part.numel() if other == root else 0 for other in range(size)]
        dist.all_to_all_single(torch.empty(sum(gets)), part, gets, gives)

    def from_one(rank: int) -> None:
        gives = [part.numel() if rank == root else 0] * size
        gets = [part.numel() if other == root else 0 for other in range(size)]
        dist.all_to_all_single(torch.empty_like(part), torch.zeros(sum(gives)), gets, gives)

    for fn in (scatter, gather, to_one, from_one):
        programs = sim.Programs()
        sim.run(size, fn, programs=programs)
        took = simulate_events(programs.programs(), cost_on(machine)).makespan_s
        wire = 3 * part.nbytes / machine.inside.bytes_per_s
        assert wire <= took <= wire + 6 * machine.inside.latency_s + 1e-9, fn.__name__


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


def train(stage: int, ranks: int, seed: int = 0) -> sim.Programs:
    """Two steps of six layers that take 1 s forward and 2 s back."""
    programs = sim.Programs()
    spec = {"stage": stage, "layers": 6, "width": 64, "seconds": 1.0, "steps": 2}

    def fn(rank: int) -> None:
        job.steps(spec, rank, lambda step: sim.compute(1e-9, f"step {step}"))

    sim.run(ranks, fn, seed=seed, programs=programs)
    return programs


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_runtime_hides_communication_that_is_shorter_than_its_layers(stage: int) -> None:
    programs = train(stage, 3).programs()
    computed = 2 * 6 * 3.0
    free = simulate_events(programs, lambda start: 0.0)
    assert free.makespan_s == pytest.approx(computed)
    # Of collectives of half a second, the second step hides all but the last reduction, and the first gather (stage
    # 3) or the six gathers of the step (below).
    half = simulate_events(programs, lambda start: 0.5 if start.num_bytes > 500 else 0.0)
    second = next(s.start_s for s in half.spans if s.rank == 0 and s.name == "step 1")
    exposed = half.makespan_s - second - computed / 2
    assert exposed == pytest.approx({3: 1.0, 2: 3.5, 0: 3.5}[stage], abs=1e-6)
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
