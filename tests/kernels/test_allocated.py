"""Bytes that torch's allocator gives a thread."""

from __future__ import annotations

import threading

import pytest
import torch

from zoo.kernels import loading
from zoo.kernels.allocated import Allocated

pytestmark = pytest.mark.skipif(not loading.native(), reason="allocations are counted by the native library")
MB = 1 << 20


def test_what_is_allocated_and_freed_counts() -> None:
    before = torch.ones(MB)
    with Allocated() as found:
        a = torch.empty(MB, dtype=torch.uint8)
        b = torch.empty(2 * MB, dtype=torch.uint8)
        assert (found.now_bytes, found.peak_bytes) == (3 * MB, 3 * MB)
        del b
        assert (found.now_bytes, found.peak_bytes) == (MB, 3 * MB)
        found.reset_peak()
        assert found.peak_bytes == MB
        del before  # nobody counted it
        a.untyped_storage().resize_(0)
        assert found.now_bytes == 0
        kept = torch.empty(MB, dtype=torch.uint8)
    del kept
    assert (found.now_bytes, found.peak_bytes) == (MB, MB)


def test_backward_counts_and_a_view_does_not() -> None:
    x = torch.ones(256, 256, requires_grad=True)
    with Allocated() as found:
        y = (x * 2).exp()
        z = y.view(-1)[10:]
        forward = found.now_bytes
        z.sum().backward()
        assert x.grad is not None
        assert found.now_bytes >= forward + x.nbytes - y.nbytes
        assert found.peak_bytes >= forward + x.nbytes


def test_threads_count_apart_and_free_for_each_other() -> None:
    given: list[torch.Tensor] = []
    told: list[int] = []
    made, freed = threading.Event(), threading.Event()

    def other() -> None:
        with Allocated() as mine:
            given.append(torch.empty(MB, dtype=torch.uint8))
            made.set()
            freed.wait()
            told.append(mine.now_bytes)

    thread = threading.Thread(target=other)
    thread.start()
    made.wait()
    with Allocated() as found:
        given.clear()
        freed.set()
        thread.join()
        assert found.now_bytes == 0
    assert told == [0]


def test_it_counts_once_and_beside_no_profiler() -> None:
    with Allocated(), pytest.raises(RuntimeError, match="counted already in this thread"), Allocated():
        pass
    with (
        torch.profiler.profile(profile_memory=True),
        pytest.raises(RuntimeError, match="torch's profiler"),
        Allocated(),
    ):
        pass
    with Allocated() as found:
        assert not torch.autograd._profiler_enabled()
        errors: list[RuntimeError] = []

        def look() -> None:
            try:
                _ = found.now_bytes
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert "in the thread, and within the context" in str(errors[0])


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "native_function", lambda *_: None)
    with pytest.raises(RuntimeError, match="zoo's native library, which is not here"), Allocated():
        pass
