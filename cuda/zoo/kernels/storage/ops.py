"""Lending on the CPU; there is none without the native library."""

from __future__ import annotations

import torch

from zoo.kernels import loading


def lend(holder: torch.UntypedStorage, memory: torch.UntypedStorage) -> bool:
    """``holder`` has the memory of ``memory`` from now on, byte for byte, until it is resized; nothing is copied.

    All tensors that share ``holder`` see it. ``holder.resize_(0)`` gives the memory back: ``memory`` dies then, if
    nobody else has it. The way to memory of one's own for a storage: torch's allocator asks the system for every large
    block anew, and each page of it is a fault.

    Returns False, and changes nothing, where that cannot be: no native library, not a CPU, a storage of a fixed size.
    """
    function = loading.native_function("zoo_lend_storage")
    return function is not None and bool(function(holder._cdata, memory._cdata))
