"""Failures of some ranks only: every rank hears of them, by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import start

from zoo import sim
from zoo.comm import (
    CollectiveMismatchError,
    Communicator,
    RankFailedError,
    agree_none_failed,
    raise_in_next,
    raise_together,
    together,
)
from zoo.comm.handles import DONE, Then, all_of


class Fails:
    """A handle whose operation failed."""

    def wait(self) -> None:
        raise ValueError("lost")


def test_what_waits_for_a_failed_operation_raises_each_time() -> None:
    def lose() -> None:
        raise ValueError("lost")

    for handle in (all_of([Fails()]), Then([], lose), Then([], Fails), Then([Then([], Fails)], lambda: DONE)):
        for _ in range(3):
            with pytest.raises(ValueError, match="lost"):
                handle.wait()
    staged = Then([Fails()], lambda: DONE, staged=True)
    for call in (staged.advance, staged.wait, staged.wait):
        with pytest.raises(ValueError, match="lost"):
            call()


@given(fails=st.lists(st.sampled_from(["", "before", "in", "in"]), min_size=1, max_size=3), seed=st.integers(0, 9))
def test_raised_together(fails: list[str], seed: int) -> None:
    """ "in": inside of the agreement; "before": in what comes before it."""
    failing = tuple(rank for rank, moment in enumerate(fails) if moment)
    told = "; ".join(f"rank {rank}: ValueError: {moment} {rank}" for rank, moment in enumerate(fails) if moment)

    def program(comm: Communicator, moment: str) -> None:
        with raise_in_next(lambda: comm, "here"):
            if moment == "before":
                raise ValueError(f"before {comm.rank}\nand more")
        with raise_together(comm, "building"):
            if moment == "in":
                raise ValueError(f"in {comm.rank}\nand more")

    def fn(rank: int) -> None:
        comm = Communicator()
        for _ in range(2):  # the ranks are at one place afterwards
            if not failing:
                program(comm, "")
                continue
            with pytest.raises((ValueError, RankFailedError)) as caught:
                program(comm, fails[rank])
            if fails[rank]:
                assert str(caught.value) == f"{fails[rank]} {rank}\nand more"
            else:
                assert isinstance(caught.value, RankFailedError)
                assert (str(caught.value), caught.value.ranks) == (f"building failed: {told}", failing)
        with pytest.raises(CollectiveMismatchError) if len(fails) > 1 else contextlib.nullcontext():
            agree_none_failed(comm, "with options", alike=str(rank))

    sim.run(len(fails), fn, seed=seed)


@pytest.mark.parametrize("interrupt", [True, False])
def test_of_what_comes_from_the_midst_of_collectives_only_word_is_left(interrupt: bool) -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        error = KeyboardInterrupt("by hand") if interrupt else ValueError("by hand")
        if rank == 1:
            if not interrupt:
                comm.report_failure(error)
            with pytest.raises(type(error)), raise_together(comm, "building"):
                raise error
        else:
            with pytest.raises(RankFailedError, match=r"rank 1 failed with .*by hand"):
                comm.all_reduce(torch.ones(1)).wait()

    sim.run(2, fn, group_timeout_s=5.0)


@pytest.mark.parametrize("world", [1, 3])
def test_together_gives_all_results_or_the_same_error(world: int) -> None:
    def fn(rank: int) -> str:
        comm = Communicator()
        assert together(comm, "counting", lambda: rank) == list(range(world))

        def work() -> None:
            if rank != 1 or world == 1:
                raise KeyError("lost") if rank == 0 else OSError("full")

        with pytest.raises(RankFailedError) as caught:
            together(comm, "saving", work)
        assert caught.value.ranks == ((0,) if world == 1 else (0, 2))
        assert (caught.value.__cause__ is None) == (rank == 1)
        with pytest.raises(ZeroDivisionError, match="saving failed: lost"):
            together(
                comm,
                "saving",
                lambda: (_ for _ in ()).throw(ValueError("lost")),  # type: ignore[arg-type, return-value]
                error=lambda text, ranks: ZeroDivisionError(text),
                plain=ValueError,
            )
        return str(caught.value)

    expected = "KeyError: 'lost'" if world == 1 else "rank 0: KeyError: 'lost'; rank 2: OSError: full"
    assert set(sim.run(world, fn)) == {f"saving failed: {expected}"}


def test_a_wait_that_fails_names_who_reported() -> None:
    """Rank 2 dies of its error; the others hear what it was, on whichever communicator they wait."""

    def fn(rank: int) -> None:
        comm = Communicator()
        part = comm.partition([[0], [1, 2]], name="part")
        if rank == 2:
            comm.report_failure(ValueError("the loss is not finite"))
        handle = part.all_reduce(torch.ones(1)) if rank == 1 else comm.all_reduce(torch.ones(1))
        for _ in range(2):
            with pytest.raises(
                RankFailedError, match="rank 2 failed with ValueError: the loss is not finite"
            ) as caught:
                handle.wait()
            assert caught.value.ranks == (2,)
            assert isinstance(caught.value.__cause__, sim.PeerLostError)
        with pytest.raises(RankFailedError, match="rank 2 failed"):
            comm.barrier()

    results = sim.run(3, fn, faults=[sim.Crash(rank=2, at=0)])
    assert isinstance(results[2], sim.Crash)


@pytest.mark.parametrize(
    "mode", [{}, {"semantics": "nccl"}, {"transport": "pairwise"}, {"transport": "shared"}], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_leaves_is_named_after_the_timeout(seed: int, mode: dict[str, str]) -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        comm.share_memory()
        if rank == 2:
            comm.report_failure(ValueError("no more data"))
            return
        handle = comm.all_gather(torch.empty(3), torch.ones(1))
        for _ in range(2):
            with pytest.raises(RankFailedError, match="rank 2 failed with ValueError: no more data") as caught:
                handle.wait()
            assert caught.value.ranks == (2,)
            assert isinstance(caught.value.__cause__, sim.WaitTimeoutError)

    sim.run(3, fn, seed=seed, group_timeout_s=5.0, **mode)


def test_a_message_that_does_not_come_tells_from_whom() -> None:
    def fn(rank: int) -> None:
        comm = Communicator()
        if rank == 1:
            return
        with pytest.raises(RankFailedError, match=r"rank 1 does not answer: WaitTimeoutError: rank 0 waited 5 s"):
            comm.all_gather(torch.empty(2), torch.ones(1)).wait()

    sim.run(2, fn, group_timeout_s=5.0, transport="pairwise")


WORKER = """
import json, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from zoo.comm import Communicator, RankFailedError
rank, store, out, how = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
(out / f"up{rank}").touch()  # the timeout is for connecting too: begin when both have come so far
while not (out / f"up{1 - rank}").exists():
    time.sleep(0.05)
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=6))
comm = Communicator()
comm.all_gather(torch.empty(2), torch.ones(1)).wait()
if rank == 1:
    if how != "silent":
        comm.report_failure(ValueError("no more data"))
    if how != "leaves":
        while not (out / "0.json").exists():  # alive, but never coming
            time.sleep(0.05)
    sys.exit(0)
found = []
start = time.monotonic()
for issue in (
    lambda: comm.all_gather(torch.empty(2), torch.ones(1)),
    lambda: comm.all_reduce(torch.ones(1)),
):
    try:
        handle = issue()
    except RankFailedError as error:
        found.append([str(error), list(error.ranks)])
        continue
    for _ in range(2):
        try:
            handle.wait()
        except RankFailedError as error:
            found.append([str(error), list(error.ranks)])
        except RuntimeError as error:
            found.append([str(error), []])
(out / "new").write_text(json.dumps([found, time.monotonic() - start]))
(out / "new").rename(out / "0.json")
"""


@pytest.mark.parametrize("how", ["leaves", *(pytest.param(how, marks=pytest.mark.slow) for how in ("stays", "silent"))])
def test_every_rank_hears_of_it_within_the_timeout(how: str, tmp_path: Path) -> None:
    processes = [start(WORKER, r, tmp_path / "store", tmp_path, how) for r in range(2)]
    try:
        assert [process.wait(timeout=100) for process in processes] == [0] * 2
    finally:
        for process in processes:
            process.kill()
    found, elapsed_s = json.loads((tmp_path / "0.json").read_text())
    if how == "silent":  # nobody said anything: the message that did not come tells from whom
        assert found[0][0].startswith("rank 1 does not answer")
        assert found[0][1] == [1]
    else:
        assert all(text.startswith("rank 1 failed with ValueError: no more data") for text, _ in found)
        assert all(ranks == [1] for _, ranks in found)
    if len(found) > 1:
        assert found[0] == found[1]
    assert elapsed_s < 30


TRAINS = """
import json, sys, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from torch import nn
from zoo.zero import ZeroOptimizer
rank, store, out, stage = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=20))
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
optimizer = ZeroOptimizer(model, stage=stage, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1)
def breaks(module, args):
    if rank == 1:
        raise ArithmeticError("this batch is broken")
try:
    for step in range(3):
        if step == 1:
            model[2].register_forward_pre_hook(breaks)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
except Exception as error:
    if rank == 0:
        (out / "0.json").write_text(json.dumps([type(error).__name__, str(error)]))
    raise
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_ends_with_an_exception_while_training_is_named_on_the_others(stage: int, tmp_path: Path) -> None:
    processes = [start(TRAINS, r, tmp_path / "store", tmp_path, stage) for r in range(2)]
    try:
        assert [process.wait(timeout=100) for process in processes] == [1] * 2
    finally:
        for process in processes:
            process.kill()
    kind, text = json.loads((tmp_path / "0.json").read_text())
    assert kind == "RankFailedError"
    assert text.startswith("rank 1 failed with ArithmeticError: this batch is broken")
