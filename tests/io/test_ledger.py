"""One account for the pools of several processes."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import start
from tests.profiles import examples

from zoo.io import BufferPool, Ledger, PoolExhaustedError, UnavailableError

PAGE = 4096


def pages(pool: BufferPool, number: int) -> torch.Tensor:
    return pool.empty(number * PAGE, dtype=torch.uint8)


def test_pools_stay_under_the_capacity_together(tmp_path: Path) -> None:
    ledgers = [Ledger(tmp_path / "ledger", 10 * PAGE) for _ in range(2)]
    (tmp_path / "ledger").unlink()
    one, two = (BufferPool(pinned=False, region_bytes=PAGE, ledger=ledger) for ledger in ledgers)
    kept, more = pages(one, 7), pages(two, 3)
    with pytest.raises(
        PoolExhaustedError,
        match=r"of 40960 bytes 40960 are reserved by all pools that share them, 12288 of these by this",
    ):
        pages(two, 1)
    del kept
    more = pages(two, 6), more
    assert ledgers[0].stats() == (10 * PAGE, 9 * PAGE, 10 * PAGE)
    assert repr(ledgers[1]) == "Ledger(36864 of 40960 bytes reserved)"
    del more
    two.trim()
    assert ledgers[0].stats().reserved_bytes == 0


@examples(times=3)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), max_size=40), st.integers(1, 8))
def test_the_account_is_the_sum_of_the_pools(
    tmp_path_factory: pytest.TempPathFactory, wishes: list[tuple[int, int]], region: int
) -> None:
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "ledger", 40 * PAGE)
    pools = [BufferPool(pinned=False, region_bytes=region * PAGE, ledger=ledger) for _ in range(3)]
    held: list[list[torch.Tensor]] = [[], [], []]
    for who, number in wishes:
        try:
            held[who].append(pages(pools[who], number).fill_(who))
        except PoolExhaustedError:
            held[who].clear()
        assert all((tensor == k).all() for k in range(3) for tensor in held[k])
        assert ledger.stats().reserved_bytes == sum(pool.stats().reserved_bytes for pool in pools) <= 40 * PAGE


def test_what_is_set_aside_is_nobody_elses(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", 10 * PAGE)
    one, two = (BufferPool(pinned=False, ledger=ledger) for _ in range(2))
    one.set_aside(6 * PAGE)
    one.trim()
    held = pages(two, 4)
    with pytest.raises(PoolExhaustedError, match="40960 are reserved by all pools"):
        two.set_aside(1)
    assert (pages(one, 6) + 0).numel() == 6 * PAGE
    assert ledger.stats().reserved_bytes == 10 * PAGE
    with pytest.raises(ValueError, match="num_bytes = 0"):
        one.set_aside(0)
    del held


OTHER = """
import sys, torch
from zoo.io import BufferPool, Ledger, PoolExhaustedError
pool = BufferPool(pinned=False, region_bytes=4096, ledger=Ledger(sys.argv[1], 64 * 4096))
for line in sys.stdin:
    try:
        held = pool.empty(int(line) * 4096, dtype=torch.uint8)
        print("got", flush=True)
        if held.numel() == 0:
            pool.trim()
    except PoolExhaustedError as error:
        print(error, flush=True)
"""


class Other:
    """A process with a pool of its own on the ledger at a path."""

    def __init__(self, path: Path) -> None:
        (asked, told), (heard, said) = os.pipe(), os.pipe()
        self.told, self.heard = os.fdopen(told, "w"), os.fdopen(heard)
        with os.fdopen(asked) as stdin, os.fdopen(said, "w") as stdout:
            self.process = start(OTHER, path, stdin=stdin, stdout=stdout)

    def ask(self, number: int) -> str:
        print(number, file=self.told, flush=True)
        return self.heard.readline().strip()


def test_processes_share_the_account(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    others = [Other(path), Other(path)]
    try:
        assert [other.ask(30) for other in others] == ["got", "got"]
        ledger = Ledger(path, 64 * PAGE)
        assert ledger.stats().reserved_bytes == 60 * PAGE
        pool = BufferPool(pinned=False, ledger=ledger)  # a region that is larger than what is left
        mine = pages(pool, 4)
        # A new buffer is taken before the old one is given back.
        assert f"of {64 * PAGE} bytes {64 * PAGE} are reserved by all pools" in others[0].ask(1)
        del mine
        pool.trim()
        assert others[0].ask(4) == "got"
        # Scarce, so the thirty pages of before went back at once.
        assert ledger.stats().reserved_bytes == 34 * PAGE
        assert others[1].ask(30) == "got"
        assert [other.ask(0) for other in others] == ["got", "got"]
    finally:
        for other in others:
            other.told.close()
            other.process.wait(timeout=60)
            other.heard.close()
    assert ledger.stats()[1:] == (0, 64 * PAGE)


def test_a_forked_child_does_not_give_back_what_its_parent_holds(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", 8 * PAGE)
    pool = BufferPool(pinned=False, region_bytes=PAGE, ledger=ledger)
    held = pages(pool, 5)
    child = os.fork()
    if child == 0:
        del held
        pool.trim()
        try:
            pool.empty(1)
        except RuntimeError as error:
            os._exit(pool.stats().reserved_bytes + ("make a pool after the fork" not in str(error)))
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ledger.stats().reserved_bytes == 5 * PAGE
    del held


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="is no ledger: it has 5 bytes, a ledger is a regular file of 4096"):
        Ledger(path, PAGE)
    path.write_bytes(os.urandom(PAGE))
    with pytest.raises(ValueError, match="is no ledger of this version"):
        Ledger(path, PAGE)
    path.unlink()
    Ledger(path, PAGE)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(
        ValueError, match="has a capacity of 4096 bytes and 8192 were given; all that share it give the"
    ):
        Ledger(str(path), 2 * PAGE)
    with pytest.raises(ValueError, match="capacity_bytes = 100; allowed is an int from 4096"):
        Ledger(path, 100)
    with pytest.raises(UnavailableError, match=r"make the ledger .*: No such file or directory"):
        Ledger(tmp_path / "no" / "where", PAGE)
