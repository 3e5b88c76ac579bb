"""``aio_handle`` of DeepSpeed's operation ``async_io``, over :class:`zoo.io.Handle`."""

from __future__ import annotations

import os

import torch

from zoo.deepspeed.adapters.zero.pinned import get_native_pinned_memory
from zoo.io import Handle

PAGE_BYTES = 4096


class aio_handle:
    """Reads and writes whole tensors at an offset of a file.

    Sizes in bytes; ``async_*`` begin, and :meth:`wait` ends all that have begun. A tensor is contiguous, on the CPU.

    Args:
        block_size: largest transfer; a device transfers pages, so what is no multiple of 4096 is rounded up to one.
    """

    def __init__(
        self, block_size: int = 1 << 20, queue_depth: int = 128, single_submit: bool = False,
        overlap_events: bool = False, intra_op_parallelism: int = 1,
    ) -> None:  # fmt: skip
        self._options = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._begun = 0
        whole = -(-block_size // PAGE_BYTES) * PAGE_BYTES
        self._handle = Handle(
            block_size=whole, queue_depth=queue_depth, single_submit=single_submit, overlap_events=overlap_events,
            num_threads=intra_op_parallelism,
        )  # fmt: skip

    def get_block_size(self) -> int:
        """As given."""
        return self._options[0]

    def get_queue_depth(self) -> int:
        """As given."""
        return self._options[1]

    def get_single_submit(self) -> bool:
        """As given."""
        return bool(self._options[2])

    def get_overlap_events(self) -> bool:
        """As given."""
        return bool(self._options[3])

    def get_intra_op_parallelism(self) -> int:
        """As given."""
        return self._options[4]

    def async_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Begin to fill the tensor from the file; 0."""
        self._handle.async_pread(buffer, filename, file_offset)
        self._begun += 1
        return 0

    def async_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Begin to write the tensor into the file; 0."""
        self._handle.async_pwrite(buffer, filename, file_offset)
        self._begun += 1
        return 0

    def wait(self) -> int:
        """Wait for all that has begun; how many that was.

        Raises:
            zoo.io.TransferError: one failed.
        """
        begun, self._begun = self._begun, 0
        self._handle.wait()
        return begun

    def sync_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Fill the tensor from the file; 1."""
        self._handle.pread(buffer, filename, file_offset)
        return 1

    def sync_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Write the tensor into the file; 1."""
        self._handle.pwrite(buffer, filename, file_offset)
        return 1

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """(num_elem,) of the dtype of the other, in aligned and where possible page-locked memory, which all handles
        know."""
        return get_native_pinned_memory().pin_empty(example_tensor, num_elem)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Give the memory of a tensor of :meth:`new_cpu_locked_tensor` back; False for another tensor. It keeps its
        values, in ordinary memory."""
        return get_native_pinned_memory().unpin(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether its memory is of :meth:`new_cpu_locked_tensor` of any handle, or page-locked by torch."""
        return get_native_pinned_memory().is_pinned(buffer)

    def get_alignment(self) -> int:
        """Bytes that offsets are multiples of where they go past the page cache: a page of each thread."""
        return PAGE_BYTES * self._options[4]

    def read(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """:meth:`sync_pread`; ``validate`` makes no difference, every transfer is checked."""
        return self.sync_pread(buffer, filename, file_offset)

    def write(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """:meth:`sync_pwrite`; ``validate`` makes no difference, every transfer is checked."""
        return self.sync_pwrite(buffer, filename, file_offset)
