"""What a compressor makes for tensors of one size: a mean over ranks, with the errors of this rank."""

from __future__ import annotations

from typing import Protocol

import torch

from zoo.comm.communicator import Communicator
from zoo.comm.compression.errors import Error, Owed
from zoo.comm.handles import DONE, Handle

Tensor = torch.Tensor


class Reducer:
    """The mean of (n,) over the ranks. A subclass has ``_begin`` and ``sent_bytes``.

    Attributes:
        comm: of the ranks.
        numel: n.
        worker: the error of this rank.
        server: that of its chunk of the mean; None where nobody compresses twice.
    """

    def __init__(self, comm: Communicator, numel: int, worker: Error | Owed, server: Error | None = None) -> None:
        self.comm, self.numel, self.worker, self.server = comm, numel, worker, server

    def start(self, x: Tensor, out: Tensor, label: str = "") -> Handle:
        """``out`` (n,) ← the mean of C(c_r), c = x + e, in place when the handle is done.

        Args:
            x: (n,) fp32, bf16 or fp16; it does not change, and is done with when this returns.
            out: (n,) fp32; it may be ``x``.
            label: of what it is, for the check of collectives.
        """
        return self._begin(x, out, label) if self.numel else DONE

    def _begin(self, x: Tensor, out: Tensor, label: str) -> Handle:
        raise NotImplementedError

    def sent_bytes(self) -> int:
        """That a rank sends to others for one mean."""
        raise NotImplementedError

    def memory_bytes(self) -> int:
        """Bytes of errors on this rank now."""
        return self.worker.memory_bytes() + (self.server.memory_bytes() if self.server is not None else 0)

    def commit(self) -> None:
        """What was sent counts: see :mod:`zoo.comm.compression.errors`."""
        self.worker.commit()
        if self.server is not None:
            self.server.commit()

    def roll_back(self) -> None:
        """What was sent does not count: errors are what they were."""
        self.worker.roll_back()
        if self.server is not None:
            self.server.roll_back()


class Compressor(Protocol):
    """A component of the kind "compressor", the same on all ranks."""

    def reducer(self, comm: Communicator, numel: int) -> Reducer:
        """How tensors of n elements are averaged; called once for each tensor, on all ranks in the same order."""
