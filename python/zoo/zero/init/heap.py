"""Memory that was freed goes back to the system.

glibc keeps freed blocks of up to 32 MiB, and small objects soon lie in them, so that the next parameter does not fit
there any more: building and freeing one module after another would take as much memory as all of them together.
``malloc_trim`` gives the pages inside of such blocks back.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

TRIM_EVERY_BYTES = 2**23


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    # Other C libraries do not have it; those that are known give pages back by themselves.
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class Trimmer:
    """Gives pages back each time that enough was freed."""

    def __init__(self) -> None:
        self._freed = 0

    def freed(self, num_bytes: int) -> None:
        """So many bytes of host memory were freed."""
        self._freed += num_bytes
        if self._freed >= TRIM_EVERY_BYTES:
            self._freed = 0
            trim = _malloc_trim()
            if trim is not None:
                trim(0)
