"""Lending and huge pages on the CPU; there is neither without the native library."""

from __future__ import annotations

import ctypes

import torch

from zoo.kernels import loading

LARGE_BYTES = 4 * 2**20
"""Two huge pages of x86-64: from here on there is a whole one in the memory wherever it begins."""


def lend(holder: torch.UntypedStorage, memory: torch.UntypedStorage) -> bool:
    """``holder`` has the memory of ``memory`` from now on, byte for byte, until it is resized; nothing is copied.

    All tensors that share ``holder`` see it. ``holder.resize_(0)`` gives the memory back: ``memory`` dies then, if
    nobody else has it. The way to memory of one's own for a storage: torch's allocator asks the system for every large
    block anew, and each page of it is a fault. ``memory`` has a fixed size from then on, so that it stays where it is.

    Returns False, and changes nothing, where that cannot be: no native library, not a CPU, a holder of a fixed size.
    """
    function = loading.native_function("zoo_lend_storage", ctypes.c_void_p, ctypes.c_void_p)
    return function is not None and bool(function(holder._cdata, memory._cdata))


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, new memory that nobody has written to, which comes in huge pages if the system has some to give.

    torch's allocator asks the system for a large block whenever one is needed, and the first touch of each of its pages
    of 4 KiB is a fault, which costs more than to fill the page; a huge page is 2 MiB. Linux gives them to whoever asks
    where ``/sys/kernel/mm/transparent_hugepage/enabled`` is "madvise", which is common, or "always". Nothing is asked
    for tensors of less than ``LARGE_BYTES``, which the C library keeps when they are freed, on GPUs, or for a tensor
    without memory of its own, such as those of a compiler.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < LARGE_BYTES or type(tensor) is not torch.Tensor:
        return tensor
    function = loading.native_function("zoo_huge_pages", ctypes.c_void_p, ctypes.c_int64)
    if function is not None:
        function(tensor.data_ptr(), tensor.nbytes)
    return tensor
