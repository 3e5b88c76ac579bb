"""``aio_handle`` of DeepSpeed's operation ``async_io``, over :class:`zoo.io.Handle`."""

from __future__ import annotations

import os

import torch

from zoo.io import Handle


class aio_handle:
    """Reads and writes whole tensors at an offset of a file.

    Sizes in bytes; ``async_*`` begin, and :meth:`wait` ends all that have begun. A tensor is contiguous, on the CPU.
    """

    def __init__(
        self, block_size: int = 1 << 20, queue_depth: int = 128, single_submit: bool = False,
        overlap_events: bool = False, intra_op_parallelism: int = 1,
    ) -> None:  # fmt: skip
        self._options = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._begun = 0
        self._handle = Handle(
            block_size=block_size, queue_depth=queue_depth, single_submit=single_submit, overlap_events=overlap_events,
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
        """(num_elem,) of the dtype of the other, in aligned and where possible page-locked memory."""
        return self._handle.empty(num_elem, dtype=example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is of :meth:`new_cpu_locked_tensor`; its memory is free when nobody has it any more."""
        return self._handle.pool.owns(tensor)
