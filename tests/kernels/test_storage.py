"""Memory lent to a storage: every tensor of it sees it, and it goes back when the storage is resized."""

from __future__ import annotations

import gc
import mmap
import os
import re
from pathlib import Path

import pytest
import torch
from tests import processes

from zoo.io import BufferPool
from zoo.kernels import loading
from zoo.kernels.storage import in_huge_pages, lend
from zoo.kernels.storage.ops import LARGE_BYTES

native = pytest.mark.skipif(not loading.native(), reason="no compiler here")


def raw(num_bytes: int) -> torch.Tensor:
    return torch.arange(num_bytes, dtype=torch.uint8)


@native
def test_tensors_of_the_holder_see_the_memory() -> None:
    holder, memory = torch.zeros(4, dtype=torch.float32), raw(16)
    view = holder.view(2, 2)[1]
    assert lend(holder.untyped_storage(), memory.untyped_storage())
    assert holder.data_ptr() == memory.data_ptr()
    assert holder.view(torch.uint8).tolist() == list(range(16))
    view.zero_()
    assert memory.tolist() == [0, 1, 2, 3, 4, 5, 6, 7] + 8 * [0]


@native
def test_it_lives_as_long_as_the_holder_and_goes_back_when_that_is_resized() -> None:
    pool = BufferPool(1 << 20, pinned=False)
    holder = torch.zeros(1024)
    storage = holder.untyped_storage()
    for _ in range(3):
        assert lend(storage, pool.empty(4096, dtype=torch.uint8).untyped_storage())
        gc.collect()
        assert pool.stats().in_use_bytes == 4096
        holder.fill_(7)
        assert holder.sum() == 7 * 1024
        storage.resize_(0)
        assert pool.stats().in_use_bytes == 0
    assert lend(storage, pool.empty(4096, dtype=torch.uint8).untyped_storage())
    del holder, storage
    assert pool.stats().in_use_bytes == 0


@native
def test_the_size_is_that_of_the_memory_and_growing_moves_away_from_it() -> None:
    pool = BufferPool(1 << 20, pinned=False)
    storage = torch.zeros(1).untyped_storage()
    assert lend(storage, pool.empty(8192, dtype=torch.uint8).fill_(3).untyped_storage())
    assert storage.nbytes() == 8192
    storage.resize_(16384)
    assert pool.stats().in_use_bytes == 0
    assert bytes(storage[:8192].tolist()) == 8192 * b"\x03"


@native
def test_what_it_cannot_be_for() -> None:
    fixed = torch.frombuffer(bytearray(16), dtype=torch.uint8).untyped_storage()
    memory = raw(16).untyped_storage()
    before = fixed.data_ptr()
    assert fixed.resizable() or not lend(fixed, memory)
    assert fixed.resizable() or fixed.data_ptr() == before
    assert not lend(memory, memory)
    assert not lend(torch.empty(4, device="meta").untyped_storage(), memory)
    assert not lend(memory, torch.empty(4, device="meta").untyped_storage())


@native
def test_memory_that_is_lent_stays_where_it_is() -> None:
    """Else whoever has it would go on in memory that is freed."""
    holder, memory, other = (torch.full((1024,), float(i)).untyped_storage() for i in range(3))
    assert lend(holder, memory)
    assert not lend(memory, holder)
    assert not lend(memory, other)
    with pytest.raises(RuntimeError, match="not resizable"):
        memory.resize_(0)
    assert lend(other, holder)  # which keeps what it was lent, as long as others have that too
    with pytest.raises(RuntimeError, match="not resizable"):
        holder.resize_(0)
    assert other.tolist() == holder.tolist() == memory.tolist()
    other.resize_(0)
    assert memory.nbytes() == holder.nbytes() == 4096


def test_there_is_none_without_the_library() -> None:
    code = (
        "import torch; from zoo.kernels.storage import lend; a, b = torch.zeros(4), torch.ones(4)\n"
        "assert not lend(a.untyped_storage(), b.untyped_storage()) and a.tolist() == [0.0] * 4"
    )
    processes.run(code, check=True, env={**os.environ, "ZOO_KERNELS": "reference"})


def flags_of(tensor: torch.Tensor) -> list[str]:
    """Those of the mapping that holds the tensor's middle, as /proc/self/smaps has them."""
    at, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= at < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("the tensor is in no mapping")


@native
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this system knows no huge pages"
)
def test_large_new_memory_is_marked_for_huge_pages() -> None:
    # Memory of its own: what the C library gives may be marked already, by whoever has used it before.
    memory = mmap.mmap(-1, 64 * 2**20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    assert "hg" not in flags_of(tensor)
    assert in_huge_pages(tensor) is tensor
    assert "hg" in flags_of(tensor)
    tensor.fill_(1)
    assert int(tensor.sum()) == tensor.numel()


def test_others_are_as_they_were() -> None:
    for tensor in (torch.empty(LARGE_BYTES - 1, dtype=torch.uint8), torch.empty(0), torch.empty(2**30, device="meta")):
        assert in_huge_pages(tensor) is tensor
