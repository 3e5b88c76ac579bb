"""Page-locked tensors, and files that are read and written in any block size."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import zoo.deepspeed as deepspeed
from zoo.config import ConfigError, load
from zoo.deepspeed.adapters.configuration.translation import translated
from zoo.deepspeed.adapters.zero.pinned import NativePinnedMemory


def test_a_pinned_tensor_says_so_and_its_views_are_pinned_too() -> None:
    memory = NativePinnedMemory()
    x = torch.arange(32.0).reshape(4, 8)
    for made in (memory.pin(x), memory.pin(x, make_copy=False), memory.pin_empty(x, 5), memory.pin_empty(x, (0, 3))):
        assert made.ds_pinned is True  # type: ignore[attr-defined]
    pinned = memory.pin(x)
    view = pinned.reshape(-1).narrow(0, 8, 8)
    assert getattr(view, "ds_pinned", False) is False
    assert memory.is_pinned(view)
    assert memory.is_pinned(pinned[3])
    assert not memory.is_pinned(x)


def test_what_is_given_back_is_pinned_no_more_and_keeps_its_values() -> None:
    memory = NativePinnedMemory()
    x = torch.arange(32.0).reshape(4, 8)
    pinned = memory.pin(x)
    before, view = pinned.data_ptr(), pinned[1:]
    assert memory.unpin(pinned) is True
    assert pinned.ds_pinned is False  # type: ignore[attr-defined]
    assert not memory.is_pinned(pinned)
    assert not memory.is_pinned(view)
    assert torch.equal(pinned, x)
    assert torch.equal(view, x[1:])
    assert pinned.data_ptr() != before
    assert memory.unpin(pinned) is False
    assert memory.unpin(x) is False
    del view
    gc.collect()
    assert memory.pin(x).data_ptr() == before  # the memory was free


def test_memory_is_given_back_as_it_was_pinned_wherever_the_tensor_is_now() -> None:
    memory = NativePinnedMemory()
    pinned = memory.pin(torch.arange(32.0))
    view, elsewhere = pinned[:1], torch.zeros(32)
    pinned.data = elsewhere
    assert memory.is_pinned(view)
    assert memory.unpin(pinned) is True
    assert not memory.is_pinned(view)
    assert pinned.data_ptr() == elsewhere.data_ptr()


def test_memory_is_free_when_the_last_view_is_gone() -> None:
    memory = NativePinnedMemory()
    pinned = memory.pin(torch.arange(32.0))
    begin, view = pinned.data_ptr(), pinned[8:16]
    del pinned
    gc.collect()
    assert memory.is_pinned(view)
    assert view[0] == 8.0
    del view
    gc.collect()
    assert memory.pin_empty(torch.ones(1), 32).data_ptr() == begin


def test_tensors_without_memory_are_not_pinned() -> None:
    memory = NativePinnedMemory()
    memory.pin(torch.ones(8))
    assert not memory.is_pinned(torch.zeros(2, device="meta"))
    with FakeTensorMode() as mode:
        assert not memory.is_pinned(mode.from_tensor(torch.zeros(2)))


@pytest.mark.parametrize("block_size", [1, 1000, 1024, 4096, 5000, 1 << 20])
def test_blocks_of_any_size(tmp_path: Path, block_size: int) -> None:
    module = deepspeed.ops.aio.AsyncIOBuilder().load()
    handle, other = module.aio_handle(block_size, 2, True, False, 2), module.aio_handle(block_size, 2)
    assert handle.get_block_size() == block_size
    given = handle.new_cpu_locked_tensor(4999, torch.empty(0, dtype=torch.uint8))
    given.copy_(torch.arange(4999) % 251)
    for reader in (handle, other):  # any handle knows it
        assert reader.is_pinned(given)
        assert reader.is_pinned(given.narrow(0, 1000, 1000))
    plain = torch.empty(4999, dtype=torch.uint8)
    assert not other.is_pinned(plain)
    path = str(tmp_path / "f")
    assert handle.write(given, path, False) == 1
    assert other.read(plain, path, True, 0) == 1
    assert torch.equal(given, plain)
    assert other.async_pread(plain[:3000], path, 1999) == 0
    assert other.wait() == 1
    assert torch.equal(plain[:3000], given[1999:])
    assert other.free_cpu_locked_tensor(given)
    assert not handle.free_cpu_locked_tensor(plain)
    assert not handle.is_pinned(given)


@pytest.mark.parametrize("bad", [0, -1, 1 << 40])
def test_block_sizes_that_cannot_be(bad: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        deepspeed.ops.aio.AsyncIOBuilder().load().aio_handle(bad)


def test_a_configuration_has_blocks_of_any_size_too() -> None:
    for given, used in ((1024, 4096), (4097, 8192), (1 << 20, 1 << 20)):
        assert load(translated({"train_batch_size": 1, "aio": {"block_size": given}})).aio.block_size == used
    for bad in (0, -5, True, "many"):
        with pytest.raises(ConfigError, match=r"aio\.block_size"):
            load(translated({"train_batch_size": 1, "aio": {"block_size": bad}}))
