"""What a compressor makes for tensors of one size: a mean over ranks, with the errors of this rank."""

from __future__ import annotations

from typing import Protocol

import torch

from zoo.comm.communicator import Communicator
from zoo.comm.compression.errors import Error, Owed
from zoo.comm.handles import DONE, Handle, Then

Tensor = torch.Tensor

_TAKEN = (torch.float32, torch.bfloat16, torch.float16)
_GIVEN = (*_TAKEN, torch.float64)


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
            x: (n,) fp32, bf16 or fp16 (fp64 is rounded); it does not change, and is done with when this returns.
            out: (n,) fp32, bf16 or fp16, contiguous; it may be ``x``.
            label: of what it is, for the check of collectives.

        Raises:
            ValueError: another shape or dtype, before anything is sent.
        """
        if x.shape != (self.numel,) or x.dtype not in _GIVEN:
            raise ValueError(f"{self._got('x', x)}; x has one dim of {self.numel:,} floating point numbers.")
        if out.shape != (self._num_out,) or out.dtype not in _TAKEN or not out.is_contiguous():
            raise ValueError(
                f"{self._got('out', out)}; out is contiguous: one dim of {self._num_out:,} numbers, fp32, bf16 or fp16."
            )
        if not self.numel:
            return DONE
        # Errors outlive the step, and would keep the graph that x belongs to.
        given = x.detach().to(torch.float32 if x.dtype is torch.float64 else x.dtype).contiguous()
        out = out.detach()
        if out.dtype is torch.float32:
            return self._begin(given, out, label)
        wide = torch.empty_like(out, dtype=torch.float32)

        def narrow() -> None:
            out.copy_(wide)

        return Then([self._begin(given, wide, label)], narrow)

    @property
    def _num_out(self) -> int:
        """Of what :meth:`start` writes on this rank."""
        return self.numel

    def _got(self, name: str, given: Tensor) -> str:
        dtype, strides = str(given.dtype).removeprefix("torch."), given.stride()
        return f"{type(self).__name__} got {name} {dtype} {tuple(given.shape)} of strides {strides}"

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
