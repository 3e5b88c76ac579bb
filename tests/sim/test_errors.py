"""Every way in which a run can fail, and what the error says."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from zoo import sim

SEEDS = range(4)


def line(text: str) -> int:
    """The number of the line of this file that ends with the comment ``# text``."""
    with open(__file__, encoding="utf-8") as source:
        return next(number for number, found in enumerate(source, 1) if found.rstrip().endswith(f"# {text}"))


@pytest.mark.parametrize("seed", SEEDS)
def test_deadlock_names_everybody(seed):
    def fn(rank: int):
        tensor = torch.ones(3)
        if rank == 0:
            dist.recv(tensor, 1, tag=4)  # the receive
        elif rank == 1:
            dist.all_reduce(tensor)  # the reduction
        elif rank == 2:
            dist.distributed_c10d._get_default_store().get("never")  # the store

    with pytest.raises(sim.DeadlockError) as caught:
        sim.run(4, fn, seed=seed)
    text = str(caught.value)
    assert f"rank 0 waits in recv of (3,) float32 from rank 1 with tag 4 at {__file__}:{line('the receive')}" in text
    assert f"rank 1 waits in all_reduce SUM of (3,) float32 at {__file__}:{line('the reduction')}" in text
    assert "on the group of ranks 0-3; waiting for ranks 0, 2-3" in text
    assert f"rank 2 waits in the store at {__file__}:{line('the store')}" in text
    assert "rank 3 had returned already" in text
    assert caught.value.ranks == (0, 1, 2)


def test_two_sends_that_wait_for_each_other_are_a_deadlock():
    def fn(rank: int):
        dist.send(torch.ones(1), 1 - rank)
        dist.recv(torch.ones(1), 1 - rank)

    with pytest.raises(sim.DeadlockError, match="rank 1 to receive it"):
        sim.run(2, fn)


def test_polling_for_ever_is_a_deadlock():
    def fn(rank: int):
        if rank == 0:
            work = dist.barrier(async_op=True)
            while not work.is_completed():
                pass

    with pytest.raises(sim.DeadlockError, match="rank 0 polls barrier"):
        sim.run(2, fn)


@pytest.mark.parametrize("seed", SEEDS)
def test_divergence_of_the_operation(seed):
    def fn(rank: int):
        if rank == 3:
            dist.reduce_scatter_tensor(torch.ones(256), torch.ones(1024))  # odd
        else:
            dist.all_gather_into_tensor(torch.ones(4), torch.ones(1))  # even

    with pytest.raises(sim.DivergenceError) as caught:
        sim.run(4, fn, seed=seed)
    assert str(caught.value).startswith(
        f"rank 3 called reduce_scatter_tensor SUM of (1024,) float32 at {__file__}:{line('odd')} where ranks 0-2 "
        f"called all_gather_into_tensor of (1,) float32 at {__file__}:{line('even')}"
    )
    assert caught.value.ranks == (3,)


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: dist.all_reduce(torch.ones(2 + (rank == 1))),
        lambda rank: dist.all_reduce(torch.ones(2, dtype=torch.float32 if rank == 1 else torch.float64)),
        lambda rank: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM),
        lambda rank: dist.broadcast(torch.ones(2), int(rank == 1)),
        lambda rank: dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(1)),
    ],
    ids=["shape", "dtype", "op", "root", "kind"],
)
def test_divergence_of_the_details(call):
    with pytest.raises(sim.DivergenceError, match=r"^rank 1 called .* where ranks 0, 2 called"):
        sim.run(3, call)


def test_divergence_is_told_even_if_a_rank_never_comes():
    def fn(rank: int):
        if rank < 2:
            dist.all_reduce(torch.ones(1 + rank))

    with pytest.raises(sim.DivergenceError, match="rank 1 called"):
        sim.run(3, fn)


def test_a_collective_that_a_rank_never_makes():
    def fn(rank: int):
        if rank != 2:
            dist.all_reduce(torch.ones(1), async_op=True)

    with pytest.raises(sim.DivergenceError, match=r"ranks 0-1 called all_reduce.* but rank 2 returned without"):
        sim.run(3, fn)
    with pytest.raises(sim.DivergenceError, match="rank 0 called send"):
        sim.run(2, lambda rank: rank == 0 and dist.isend(torch.ones(1), 1) and None)


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: dist.all_to_all_single(
            torch.ones(2), torch.ones(3 if rank else 2), None, [1, 2] if rank else None
        ),
        lambda rank: dist.all_to_all([torch.ones(1), torch.ones(1)], [torch.ones(1), torch.ones(1 + rank)]),
        lambda rank: dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1 + rank)),
        lambda rank: dist.gather(torch.ones(1 + rank), [torch.ones(1), torch.ones(1)] if rank == 0 else None),
        lambda rank: dist.scatter(torch.ones(1 + rank), [torch.ones(1), torch.ones(1)] if rank == 0 else None),
        lambda rank: dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(1), 0),
        lambda rank: dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1, dtype=torch.int64), 0),
    ],
    ids=["all_to_all_single", "all_to_all", "all_gather", "gather", "scatter", "send size", "send dtype"],
)
def test_sizes_that_do_not_fit_name_both_sides(call):
    with pytest.raises(sim.DivergenceError, match=r"rank [01] .*rank 1|rank 1 .*rank [01]"):
        sim.run(2, call)


def test_groups_made_in_different_orders():
    def fn(rank: int):
        for ranks in ([0, 1], [1, 2]) if rank != 1 else ([1, 2], [0, 1]):
            dist.new_group(ranks)

    with pytest.raises(sim.DivergenceError, match="same order"):
        sim.run(3, fn)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_exception_in_a_rank(seed):
    unwound = []

    def fn(rank: int):
        try:
            dist.barrier()
            if rank == 1:
                raise KeyError("lost")
            try:
                dist.barrier()
            except Exception:
                unwound.append("swallowed")
        finally:
            unwound.append(rank)

    with pytest.raises(sim.RankError, match="rank 1 raised KeyError: 'lost'") as caught:
        sim.run(3, fn, seed=seed)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.ranks == (1,)
    assert sorted(unwound) == [0, 1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("zoo.sim")]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(1)), "2 times the elements"),
        (lambda: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(3)), "2 times the elements"),
        (lambda: dist.reduce_scatter(torch.ones(2), [torch.ones(1)] * 2), "same size"),
        (lambda: dist.all_gather([torch.ones(1)], torch.ones(1)), "one for each rank"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "2 divides"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [1, 2]), "sum to 3"),
    ],
)
def test_wrong_sizes_are_value_errors_in_the_rank(call, words):
    with pytest.raises(sim.RankError, match=words) as caught:
        sim.run(2, lambda rank: call())
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_operation_that_torch_cannot_do_fails_in_the_ranks():
    with pytest.raises(sim.RankError, match="bitwise") as caught:
        sim.run(2, lambda rank: dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND))
    assert caught.value.__cause__ is not None


def test_wrong_arguments():
    def nothing(rank: int) -> None:
        return None

    for given, words in [
        ({"world_size": 0, "fn": nothing}, "1 or more"),
        ({"world_size": 2.5, "fn": nothing}, "must be ints"),
        ({"world_size": 2, "fn": None}, "a function of the rank"),
        ({"world_size": 2, "fn": nothing, "timeout_s": 0}, "above 0"),
        ({"world_size": 2, "fn": nothing, "faults": [sim.Crash(rank=2, at=0)]}, "ranks of this run are 0 to 1"),
        ({"world_size": 2, "fn": nothing, "faults": [sim.Crash(rank=1, at=-1)]}, "counted from 0"),
        ({"world_size": 2, "fn": nothing, "faults": [sim.Delay(rank=1, at=0, by=-1)]}, "by >= 0"),
        ({"world_size": 2, "fn": nothing, "faults": [sim.Crash(rank=1, at=0)] * 2}, "dies only once"),
        ({"world_size": 2, "fn": nothing, "faults": ["crash"]}, "allowed are"),
    ]:
        with pytest.raises(ValueError, match=words):
            sim.run(**given)


def test_runs_do_not_nest():
    with pytest.raises(sim.RankError, match="do not nest") as caught:
        sim.run(2, lambda rank: sim.run(2, lambda inner: inner))
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_backend_is_refused_outside():
    sim.run(1, lambda rank: None)
    with pytest.raises(ValueError, match=re.escape("only inside of zoo.sim.run")):
        dist.init_process_group("zoo_sim", store=dist.HashStore(), rank=0, world_size=1)


def test_another_thread_may_not_communicate():
    def fn(rank: int):
        group, errors = dist.group.WORLD, []

        def work() -> None:
            try:
                group.barrier()
            except ValueError as error:
                errors.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return errors

    assert "only communicate from the thread" in sim.run(1, fn)[0][0]


def test_a_rank_that_computes_for_ever():
    def fn(rank: int):
        if rank == 1:
            while True:  # spinning
                pass
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(sim.SimTimeoutError, match=r"rank 1 has computed for 0\.3 s") as caught:
        sim.run(3, fn, timeout_s=0.3)
    assert f"{__file__}" in str(caught.value)
    assert time.monotonic() - start < 5
    assert sim.run(2, lambda rank: rank) == [0, 1]


@pytest.mark.dear
def test_time_in_which_the_whole_process_was_stopped_does_not_count() -> None:
    """Ctrl-Z in a terminal, a debugger, a laptop that sleeps: no rank is to blame."""
    code = (
        "import sys; from zoo import sim\n"
        "def fn(rank):\n"
        "    if rank == 0:\n"
        "        print('computes', flush=True); sys.stdin.readline()\n"
        "sim.run(2, fn, timeout_s=4.0); print('done')"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "computes\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(5)
        child.send_signal(signal.SIGCONT)
        out, err = child.communicate("\n", timeout=60)
    assert (out, child.returncode) == ("done\n", 0), err
