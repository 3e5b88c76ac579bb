"""Pool tensors: aligned, bounded, given back."""

import ctypes
import gc
import itertools
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import processes
from tests.profiles import examples

from zoo.io import BufferPool, PoolExhaustedError, UnavailableError

MB = 1 << 20


@examples(times=3)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]), st.integers(0, 300_000), st.booleans()
        ),
        max_size=30,
    )
)
def test_tensors_do_not_share_bytes_and_memory_comes_back(wishes: list[tuple[torch.dtype, int, bool]]) -> None:
    pool = BufferPool(4 * MB, pinned=False)
    held: list[tuple[torch.Tensor, int]] = []
    for number, (dtype, size, drop) in enumerate(wishes):
        try:
            tensor = pool.empty(size, dtype=dtype)
        except PoolExhaustedError:
            held.clear()
            continue
        assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (dtype, (size,), True)
        assert tensor.data_ptr() % 4096 == 0
        held.append((tensor.fill_(number % 100), number % 100))
        if drop:
            held.pop(0)
        assert all((tensor == value).all() for tensor, value in held)
        stats = pool.stats()
        assert sum(t.nbytes for t, _ in held) <= stats.in_use_bytes <= stats.reserved_bytes <= 4 * MB
    held.clear()
    tensor = None
    assert pool.stats().in_use_bytes == 0


def test_the_same_steps_take_nothing_new_and_views_keep_memory() -> None:
    pool = BufferPool(256 * MB, pinned=False)
    for _ in range(100):
        tensors = [pool.empty((k, 1000)) for k in range(1, 30)]
        reserved = pool.stats().reserved_bytes
        assert reserved == 64 * MB
        del tensors
    view = pool.empty(1000)[10:20]
    assert pool.owns(view)
    assert pool.stats().buffers == 1
    assert not pool.owns(torch.empty(10))
    del view
    assert pool.stats().buffers == 0
    pool.trim()
    assert pool.stats().reserved_bytes == 0
    assert pool.stats().peak_bytes > 0


def test_the_cap_is_hard_and_the_sentence_has_the_numbers() -> None:
    pool = BufferPool(MB, pinned=False)
    kept = pool.empty(600_000, dtype=torch.uint8)
    with pytest.raises(
        PoolExhaustedError, match=r"602112 of its 1048576 bytes are in use and the largest gap is 446464"
    ):
        pool.empty(600_000, dtype=torch.uint8)
    assert isinstance(PoolExhaustedError(""), MemoryError)
    del kept
    pool.empty(MB, dtype=torch.uint8)
    with pytest.raises(ValueError, match="capacity_bytes = 100"):
        BufferPool(100)
    with pytest.raises(ValueError, match="sizes are 0 or more"):
        pool.empty(-1)
    with pytest.raises(PoolExhaustedError):
        pool.empty(1 << 60)
    for shape in ((1 << 70,), (1 << 40, 1 << 40)):
        with pytest.raises(PoolExhaustedError, match=r"and torch.float64 has \d+ bytes; no pool has more than"):
            pool.empty(shape, dtype=torch.float64)


def test_threads_may_take_and_drop() -> None:
    pool = BufferPool(64 * MB, pinned=False)

    def work() -> None:
        for k in range(300):
            tensor = pool.empty(1000 + 37 * k, dtype=torch.uint8).fill_(k % 256)
            assert (tensor == k % 256).all()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (pool.stats().in_use_bytes, pool.stats().allocations) == (0, 1200)


class Copy:
    """Stands in for a recorded ``torch.cuda.Event``: a device passes it when the test says so, or who waits for it."""

    def __init__(self) -> None:
        self.passed, self.asked, self.waited = False, 0, 0

    def query(self) -> bool:
        self.asked += 1
        return self.passed

    def synchronize(self) -> None:
        self.waited += 1
        self.passed = True


def test_memory_that_a_device_uses_goes_to_nobody_before_the_device_has_passed() -> None:
    pool = BufferPool(8 * MB, pinned=False)
    first, copy = pool.empty(MB, dtype=torch.uint8), Copy()
    address = first.data_ptr()
    pool.record_event(first[5:10], copy)
    del first
    others = [pool.empty(MB, dtype=torch.uint8) for _ in range(3)]
    assert address not in {other.data_ptr() for other in others}
    assert (pool.stats().in_use_bytes, copy.waited) == (4 * MB, 0)
    copy.passed = True
    assert pool.empty(MB, dtype=torch.uint8).data_ptr() == address
    assert (pool.stats().in_use_bytes, copy.waited) == (3 * MB, 0)
    asked = copy.asked
    pool.empty(MB)
    assert copy.asked == asked, "an event that was passed is forgotten"


def test_a_pool_waits_for_a_device_only_where_nothing_else_fits() -> None:
    pool = BufferPool(2 * MB, pinned=False)
    copies = [Copy(), Copy()]
    for copy in copies:
        pool.record_event(pool.empty(MB, dtype=torch.uint8), copy)
    assert pool.stats().in_use_bytes == 2 * MB
    held = pool.empty(MB, dtype=torch.uint8)
    assert [copy.waited for copy in copies] == [1, 0], "the oldest, and no other"
    assert held.numel() == MB
    with pytest.raises(PoolExhaustedError):
        pool.empty(2 * MB, dtype=torch.uint8)
    assert [copy.waited for copy in copies] == [1, 1]
    again = Copy()
    pool.record_event(held, again)
    pool.record_event(pool.empty(MB, dtype=torch.uint8), Copy())
    del held
    pool.set_aside(2 * MB)
    assert again.waited == 1


def test_a_tensor_with_several_copies_waits_for_all_and_a_living_one_is_kept() -> None:
    pool = BufferPool(4 * MB, pinned=False)
    tensor, first, second = pool.empty(MB, dtype=torch.uint8).fill_(7), Copy(), Copy()
    pool.record_event(tensor, first)
    pool.record_event(tensor, second)
    first.passed = True
    address = tensor.data_ptr()
    del tensor
    assert pool.empty(MB, dtype=torch.uint8).data_ptr() != address
    second.passed = True
    tensor = pool.empty(MB, dtype=torch.uint8)
    assert tensor.data_ptr() == address
    pool.record_event(tensor, first)
    assert pool.empty(MB, dtype=torch.uint8).data_ptr() != address


def test_a_pool_that_dies_waits_for_devices_and_an_event_that_fails_frees_nothing() -> None:
    pool, copy = BufferPool(4 * MB, pinned=False), Copy()
    pool.record_event(pool.empty(MB), copy)
    del pool
    gc.collect()
    assert copy.waited == 1

    class Broken(Copy):
        def query(self) -> bool:
            raise RuntimeError("the device is gone")

    pool = BufferPool(64 * MB, pinned=False)
    tensor = pool.empty(MB)
    address = tensor.data_ptr()
    pool.record_event(tensor, Broken())
    del tensor
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device is gone"):
            pool.empty(MB)

    class Stuck(Copy):
        gone = True

        def synchronize(self) -> None:
            if self.gone:
                raise RuntimeError("the device is gone")

    full, stuck = BufferPool(MB, pinned=False), Stuck()
    full.record_event(full.empty(MB, dtype=torch.uint8), stuck)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device is gone"):
            full.empty(MB, dtype=torch.uint8)
    assert full.stats().in_use_bytes == MB
    stuck.gone = False
    assert full.empty(MB, dtype=torch.uint8).numel() == MB
    with pytest.raises(ValueError, match=r"a tensor of shape \(3,\) on cpu is not of this pool"):
        pool.record_event(torch.zeros(3), copy)
    assert pool.owns(torch.empty(0)) is False
    assert address


FORKED = """
import os, torch, zoo.io

class Never:
    def query(self):
        return False
    def synchronize(self):
        os._exit(4)

pool = zoo.io.BufferPool(1 << 22, pinned=False)
event = Never()
pool.record_event(pool.empty(1000), event)
child = os.fork()
if child == 0:
    try:
        pool.empty(1000)
    except RuntimeError as error:
        assert "make a pool after the fork" in str(error), error
        raise SystemExit(0)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
Never.query, Never.synchronize = lambda self: True, lambda self: None
"""


def test_a_forked_child_does_not_wait_for_its_parents_device() -> None:
    processes.run(FORKED, check=True)


@examples(times=2)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 9)), max_size=40))
def test_no_two_tensors_share_bytes_that_a_device_still_uses(steps: list[tuple[int, int, int]]) -> None:
    """Against a model: bytes of living tensors and of copies under way are apart."""
    pool = BufferPool(8 * 4096, pinned=False, region_bytes=4 * 4096)
    living: list[torch.Tensor] = []
    lent: list[tuple[int, int, Copy]] = []
    for action, pages, which in steps:
        if action == 0:
            try:
                living.append(pool.empty(pages * 4096, dtype=torch.uint8))
            except PoolExhaustedError:
                assert all(copy.passed for *_, copy in lent), "refused while there was something to wait for"
        elif living and action == 1:
            tensor = living[which % len(living)]
            lent.append((tensor.data_ptr(), tensor.nbytes, Copy()))
            pool.record_event(tensor, lent[-1][2])
        elif living and action == 2:
            living.pop(which % len(living))
        elif lent and action == 3:
            lent[which % len(lent)][2].passed = True
        ranges = {(tensor.data_ptr(), tensor.nbytes) for tensor in living}
        ranges |= {(start, length) for start, length, copy in lent if not copy.passed}
        ordered = sorted(ranges)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ordered))


def test_page_locked_memory_is_loudly_absent() -> None:
    if torch.cuda.is_available():
        assert BufferPool(MB, pinned=True).empty(10).is_pinned()
        return
    with pytest.raises(UnavailableError, match="page-locked memory was demanded and cannot be had: "):
        BufferPool(MB, pinned=True)
    assert not BufferPool(MB).pinned


FAKE = """
#include <stdio.h>
static int locked = 0;
int cudaGetDeviceCount(int* n) { *n = 1; return 0; }
int cudaHostRegister(void* p, unsigned long len, unsigned flags) {
  if (len > (100ul << 20)) return 2;
  locked++; printf("lock %lu flags %u\\n", len, flags); fflush(stdout); return 0;
}
int cudaHostUnregister(void* p) { locked--; printf("unlock, %d left\\n", locked); fflush(stdout); return 0; }
const char* cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "?"; }
"""

USE_FAKE = """
import torch, zoo.io
pool = zoo.io.BufferPool(1 << 30, pinned=True)
a, b = pool.empty(1000), pool.empty(1000)
try:
    pool.empty(200 << 20, dtype=torch.uint8)
except zoo.io.UnavailableError as error:
    print(error)
del a, b
pool.trim()
"""


def test_a_cuda_runtime_is_found_at_run_time_and_its_errors_are_told(tmp_path: Path) -> None:
    """A stand-in for libcudart with the functions the pool calls: no GPU is needed to see that they are called."""
    (tmp_path / "fake.c").write_text(FAKE)
    library = tmp_path / "libfake.so"
    compiled = subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "fake.c"], check=False)
    if compiled.returncode:
        pytest.skip("no C compiler")
    ctypes.CDLL(str(library))
    done = processes.run(USE_FAKE, env={**os.environ, "ZOO_CUDART": str(library)}, check=True)
    assert done.stdout.splitlines() == [
        "lock 67108864 flags 1",
        "the CUDA runtime refused to lock 209715200 bytes: out of memory (code 2)",
        "unlock, 0 left",
    ]
