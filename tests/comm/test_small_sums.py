"""Small all-reduces in shared memory: bitwise those in rank order, however many are in flight and whoever is first."""

from __future__ import annotations

import os
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import run_ranks
from tests.profiles import examples

from zoo.comm import Communicator, RankFailedError
from zoo.comm.small_sums import MOST_BYTES, SmallSums
from zoo.comm.transport import combine_in_rank_order
from zoo.io import _native

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
SUM = st.tuples(st.sampled_from(DTYPES), st.sampled_from(["sum", "max", "min"]), st.integers(1, 1500))


def data(rank: int, number: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(n, generator=torch.Generator().manual_seed(1000 * number + rank)) * 100
    if dtype.is_floating_point and number % 5 == 3:
        made[:: 7 + rank] = float("nan") if number % 2 else float("inf")
    return made.to(dtype)


def expected(world: int, number: int, which: tuple[torch.dtype, str, int]) -> torch.Tensor:
    dtype, op, n = which
    out = torch.empty(n, dtype=dtype)
    combine_in_rank_order([data(rank, number, n, dtype) for rank in range(world)], out, op)
    return out


def group(world: int, wait_s: float = 20.0) -> list[SmallSums]:
    """Of ranks that are threads."""
    areas = [torch.zeros(_native.small_sums_bytes(world)[0], dtype=torch.uint8) for _ in range(world)]
    segments: list[Any] = [SimpleNamespace(area=lambda area=area: area) for area in areas]
    post: Any = SimpleNamespace(look=lambda peers: None)
    return [
        SmallSums(
            rank, segments[rank], {p: segments[p] for p in range(world) if p != rank}, post,
            [100 + p for p in range(world) if p != rank], wait_s,
        )
        for rank in range(world)
    ]  # fmt: skip


def in_threads(world: int, fn: Any) -> None:
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            fn(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The bits; a NaN is a NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@examples(times=3)
@given(
    world=st.integers(2, 4), sums=st.lists(SUM, min_size=1, max_size=40), seed=st.integers(0, 2**16),
    drops=st.booleans(),
)  # fmt: skip
def test_any_number_in_flight_gives_the_sums_in_rank_order(world: int, sums: list[Any], seed: int, drops: bool) -> None:
    ranks = group(world)

    def fn(rank: int) -> None:
        mine, own = ranks[rank], random.Random(f"{seed} {rank}")
        flying = []
        for number, (dtype, op, n) in enumerate(sums):
            tensor = data(rank, number, n, dtype)
            flying.append((number, tensor, mine.begin(number, tensor, op)))
            while flying and own.random() < 0.4:
                finish(flying.pop(own.randrange(len(flying))), own)
        own.shuffle(flying)
        while flying:
            finish(flying.pop(), own)

    def finish(one: tuple[int, torch.Tensor, Any], own: random.Random) -> None:
        number, tensor, work = one
        if drops and own.random() < 0.3:
            return
        work.wait()
        work.wait()  # changes nothing
        assert same(tensor, expected(world, number, sums[number]))

    in_threads(world, fn)
    assert not any(rank._flying for rank in ranks)


def test_ranks_that_make_other_ones_are_told() -> None:
    ranks = group(2)
    told: dict[int, str] = {}

    def fn(rank: int) -> None:
        tensor = torch.ones(3 + rank)
        with pytest.raises(RankFailedError, match="made another collective") as found:
            ranks[rank].begin(7 + rank, tensor, "sum").wait()
        told[rank] = str(found.value)
        assert found.value.ranks == (101 - rank,)
        assert bool((tensor == 1).all())

    in_threads(2, fn)
    assert "12 bytes; there: 16" in told[0]
    assert "16 bytes; there: 12" in told[1]


def test_a_peer_that_does_not_come_is_named_and_one_that_does_not_read_ends_the_issue() -> None:
    mine = group(2, wait_s=0.3)[0]
    with pytest.raises(RankFailedError, match=r"rank 101 does not answer: .*waited 0\.3 s"):
        mine.begin(0, torch.ones(1), "sum").wait()
    for _ in range(15):  # one of 16 is there from before
        mine.begin(0, torch.ones(1), "sum")
    with pytest.raises(RuntimeError, match="too many small all-reduces"):
        mine.begin(0, torch.ones(1), "sum")


def in_processes(rank: int, world: int) -> bool:
    comm = Communicator()
    assert comm.share_memory()
    choice, own = random.Random(3), random.Random(rank)
    flying = []
    for number in range(300):
        which = choice.choice(DTYPES), choice.choice(["sum", "max", "min"]), choice.choice([1, 30, 1000, 9000])
        tensor = data(rank, number, which[2], which[0])
        flying.append((number, which, tensor, comm.all_reduce(tensor, which[1])))
        if own.random() < 0.5:
            own.shuffle(flying)
            for one, its, out, handle in flying:
                handle.wait()
                assert same(out, expected(world, one, its)), (one, its)
            flying.clear()
    for *_, handle in flying:
        handle.wait()
    small: Any = comm._transport._small  # type: ignore[union-attr]
    assert small.takes(torch.empty(MOST_BYTES // 4))
    assert not small.takes(torch.empty(MOST_BYTES // 4 + 1))
    if os.fork() == 0:  # a child's copies of handles say nothing to the peers
        os._exit(0)
    os.wait()
    torch.distributed.barrier()
    return True


def test_processes_have_the_same_sums() -> None:
    assert run_ranks(3, in_processes, 3) == dict.fromkeys(range(3), True)
