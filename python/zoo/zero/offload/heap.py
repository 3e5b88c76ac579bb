"""Large blocks that go back to the system when they are freed.

glibc raises the size from which it maps a block of its own with every such block that is freed, up to 32 MiB; from then
on parameters and gradients lie in the heap between small objects that stay, and what is freed in between fits the next
one badly. Measured with 12 layers of 4 MiB from NVMe: 290 MB of growth, against 10 MB beside the buffers.
"""

from __future__ import annotations

import ctypes
import functools

_M_MMAP_THRESHOLD = -3
THRESHOLD_BYTES = 1 << 20


@functools.cache
def map_large_blocks() -> None:
    """For the rest of the process blocks of 1 MiB and more are mapped, and unmapped when freed.

    Without effect where the C library has no ``mallopt``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, THRESHOLD_BYTES)
