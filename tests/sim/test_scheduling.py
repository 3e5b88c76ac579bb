"""Determinism, asynchronous handles, isolation of the ranks, and that nothing is left behind."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zoo import sim


def chatter(rank: int) -> list[float]:
    pair = dist.new_group([0, 1])
    tensor = torch.tensor([float(rank)])
    works = [dist.all_reduce(tensor.clone(), async_op=True) for _ in range(3)]
    if rank < 2:
        dist.all_reduce(tensor, group=pair)
    for work in works:
        work.wait()
    dist.barrier()
    dist.broadcast(tensor, 0)
    return tensor.tolist()


def test_one_seed_one_trace_and_other_seeds_other_interleavings():
    traces = []
    for seed in (0, 0, 1, 2, 3):
        trace = sim.Trace()
        assert sim.run(4, chatter, seed=seed, trace=trace) == [[1.0]] * 4
        traces.append(trace)
    assert traces[0] == traces[1]
    assert len({str(trace.events) for trace in traces}) == 4
    for trace in traces:
        orders = [trace.order(rank, (0, 1, 2, 3)) for rank in range(4)]
        assert orders[0] == orders[1] == orders[2] == orders[3]
        assert [event[0] for event in orders[0]] == ["all_reduce"] * 3 + ["barrier", "broadcast"]
        assert trace.order(0, (0, 1)) == trace.order(1, (0, 1))


def test_a_list_is_a_trace_too():
    events: list[sim.Event] = []
    sim.run(2, lambda rank: dist.all_reduce(torch.ones(3, 2)), trace=events)
    assert [(e.op, e.group, e.shape, e.dtype, e.num_bytes, e.peer) for e in events] == [
        ("all_reduce", (0, 1), (3, 2), "float32", 24, None)
    ] * 2


def test_one_rank_runs_at_a_time():
    inside = []

    def fn(rank: int):
        for _ in range(5):
            inside.append(rank)
            time.sleep(0.0005)
            assert inside == [rank]
            inside.clear()
            dist.barrier()

    sim.run(4, fn)


def test_a_missing_wait_shows_on_some_seed():
    def fn(rank: int):
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        seen = tensor.item()
        work.wait()
        return seen, tensor.item()

    results = [result for seed in range(10) for result in sim.run(2, fn, seed=seed)]
    assert {seen for seen, _ in results} == {1.0, 2.0}
    assert {after for _, after in results} == {2.0}


def test_a_buffer_changed_in_flight_shows_on_some_seed():
    def fn(rank: int):
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        tensor.add_(1)
        work.wait()
        return tensor.item()

    assert len({tuple(sim.run(2, fn, seed=seed)) for seed in range(20)}) > 1


def test_work_handles():
    def fn(rank: int):
        tensor = torch.ones(2)
        work = dist.all_reduce(tensor, async_op=True)
        polls = 0
        while not work.is_completed():
            polls += 1
        assert work.wait()
        assert work.is_success()
        second = dist.all_reduce(tensor, async_op=True)
        ran_on = []
        future = second.get_future().then(lambda done: (ran_on.append(dist.get_rank()), done.value()[0] * 10)[1])
        value = second.get_future().wait()
        assert value[0] is tensor or torch.equal(value[0], tensor)
        second.wait()
        assert ran_on == [rank]
        return tensor.tolist(), future.wait().tolist()

    for seed in range(5):
        assert sim.run(2, fn, seed=seed) == [([4, 4], [40, 40])] * 2


def test_each_rank_has_its_own_random_numbers():
    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    def fn(rank: int):
        first = draw()
        dist.barrier()
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        dist.barrier()
        second = draw()
        dist.barrier()
        return first, second, draw()

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    results = sim.run(3, fn, seed=1)
    after = draw()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert draw() == after == results[0][0] == results[2][0]
    for rank in range(3):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        assert (draw(), draw()) == results[rank][1:]


def test_grad_mode_belongs_to_the_rank():
    def fn(rank: int):
        with torch.set_grad_enabled(rank == 0):
            dist.barrier()
            enabled = torch.is_grad_enabled()
            dist.barrier()
        return enabled

    assert sim.run(2, fn) == [True, False]


def test_dispatch_modes_do_not_see_the_data_move():
    from torch.utils.flop_counter import FlopCounterMode

    def fn(rank: int):
        with FlopCounterMode(display=False) if rank == 0 else torch.no_grad():
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            return tensor.tolist()

    assert sim.run(3, fn) == [[3, 3]] * 3


def test_a_real_default_group_is_kept():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = c10d._world
        assert sim.run(2, lambda rank: dist.get_world_size()) == [2, 2]
        assert c10d._world is before
        assert dist.get_world_size() == 1
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
    finally:
        dist.destroy_process_group()


@pytest.mark.dear
def test_nothing_is_left_behind():
    def state() -> tuple[object, ...]:
        return threading.active_count(), c10d._world, sys.excepthook, dist.is_initialized(), dict(c10d._world.pg_map)

    def fn(rank: int):
        dist.new_group([0])
        dist.all_reduce(torch.ones(1))

    def kept() -> int:
        """Objects that live; under a tracer (coverage keeps data of every thread) those of classes of zoo and torch."""
        gc.collect()
        found = gc.get_objects()
        if sys.gettrace() is None:
            return len(found)
        return sum(str(type(one).__module__).partition(".")[0] in ("zoo", "torch") for one in found)

    sim.run(2, fn)
    before = state()
    objects = kept()
    for seed in range(200):
        sim.run(2, fn, seed=seed)
    assert kept() - objects < 200
    assert state() == before


def test_the_default_group_can_be_destroyed_and_made_again():
    def fn(rank: int):
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        dist.init_process_group("zoo_sim", store=store, rank=rank, world_size=2)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return tensor.item()

    assert sim.run(2, fn) == [2, 2]


def test_it_is_fast():
    def fn(rank: int):
        tensor = torch.ones(64)
        for _ in range(50):
            dist.all_reduce(tensor)

    sim.run(8, fn)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        sim.run(8, fn)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0  # about 0.07 s; the margin is for busy machines


@pytest.mark.parametrize("env", ["1"])
def test_store_barrier_after_init(env, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", env)
    assert sim.run(3, chatter) == [[1.0]] * 3
