"""Pool tensors: aligned, bounded, given back."""

import ctypes
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
