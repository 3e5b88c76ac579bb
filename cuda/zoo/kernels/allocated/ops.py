"""Counting on the CPU; there is none without the native library."""

from __future__ import annotations

import ctypes
from typing import Any

from zoo.kernels import loading

_NUMBER = ctypes.c_void_p


class Allocated:
    """``with Allocated() as found``: bytes of the CPU that this thread allocates through torch in there, tensors and
    what operations need beside them, temporaries of a kernel too.

    A block that another counting thread frees is one less of the thread that allocated it; what was there before the
    context counts neither now nor when it goes. Backward of a graph on the CPU runs in the calling thread.

    Attributes:
        now_bytes: allocated and not freed. peak_bytes: the most since the context, or :meth:`reset_peak`, began. After
            the context both are what they were at its end.

    Raises:
        RuntimeError: from the context, where this thread counts already or torch's profiler runs in it, whose
            place in the allocator this takes; or where there is no native library.
    """

    def __init__(self) -> None:
        self._found = (0, 0)
        self._counts = False

    def __enter__(self) -> Allocated:
        function = loading.native_function("zoo_count_allocated")
        if function is None:
            raise RuntimeError(f"allocated bytes are counted by zoo's native library, which is not here: {_why()}")
        if not function():
            raise RuntimeError(
                "allocated bytes cannot be counted while they are counted already in this thread, or torch's profiler "
                "runs: end that first."
            )
        self._counts, self._found = True, (0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._found, self._counts = self._read(), False
        _function("zoo_stop_counting_allocated")()

    @property
    def now_bytes(self) -> int:
        """Allocated and not freed."""
        return self._read()[0]

    @property
    def peak_bytes(self) -> int:
        """The most at the same time."""
        return self._read()[1]

    def reset_peak(self) -> None:
        """The peak is what is allocated now."""
        self._read(again=True)

    def _read(self, *, again: bool = False) -> tuple[int, int]:
        if not self._counts:
            return self._found
        now, most = ctypes.c_int64(), ctypes.c_int64()
        function = _function("zoo_allocated", _NUMBER, _NUMBER, ctypes.c_int32)
        if not function(ctypes.addressof(now), ctypes.addressof(most), int(again)):
            raise RuntimeError("allocated bytes are read in the thread, and within the context, that counts them.")
        return now.value, most.value


def _function(name: str, *arguments: Any) -> Any:
    function = loading.native_function(name, *arguments)
    if function is None:
        raise RuntimeError(f"zoo's native library is not here any more: {_why()}")
    return function


def _why() -> str:
    return loading.why_not() or "ZOO_KERNELS says reference."
