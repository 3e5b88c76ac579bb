"""Large blocks that go back to the system when they are freed.

glibc raises the size from which it maps a block of its own with every such block that is freed, up to 32 MiB; from then
on parameters and gradients lie in the heap between small objects that stay, and what is freed in between fits the next
one badly. Measured with 12 layers of 4 MiB from NVMe: 290 MB of growth, against 10 MB beside the buffers.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_BYTES = 1 << 20
_HEAP_BYTES = 32 << 20  # as far as glibc itself goes

_mapped = False


def map_large_blocks() -> None:
    """From now on blocks of 1 MiB and more are mapped, and unmapped when freed: for all of the process.

    Without effect where the C library has no ``mallopt``.
    """
    global _mapped
    _mapped = True
    _set(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def give_back_free_blocks() -> None:
    """What was freed goes back to the system, wherever it lies. Without effect where there is no ``malloc_trim``."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def large_blocks_are_mapped() -> bool:
    """Whether :func:`map_large_blocks` is in force."""
    return _mapped


def reuse_large_blocks() -> None:
    """End :func:`map_large_blocks`: where nothing large is kept between small objects it costs page faults only."""
    global _mapped
    _mapped = False
    _set(_M_MMAP_THRESHOLD, _HEAP_BYTES)
    _set(_M_TRIM_THRESHOLD, 2 * _HEAP_BYTES)


def _set(option: int, num_bytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, num_bytes)
