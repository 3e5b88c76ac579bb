"""Codecs: a few bytes that stand for many numbers.

A codec keeps no state; what it leaves out is kept by :mod:`zoo.comm.compression.errors`, and how its bytes travel is
decided by a collective: ``two_step.py`` unless it says otherwise, or ``gathered.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from zoo.comm.communicator import Communicator
    from zoo.comm.compression.reducer import Reducer

Tensor = torch.Tensor


class Codec:
    """C: (n,) fp32 → bytes → (n,) fp32. A subclass has a dataclass ``Config``; one object serves any number of tensors.

    NaN and infinity in c make what arrives NaN or infinite somewhere in their group, so that an overflow is seen.
    """

    name: ClassVar[str]
    one_pass: ClassVar[bool] = False
    """Whether :meth:`encode_sum_` and :meth:`encode_mean_` take a ``last``, for less traffic to memory."""

    def reducer(self, comm: Communicator, numel: int) -> Reducer:
        """How tensors of n elements are averaged."""
        from zoo.comm.compression.two_step import TwoStep

        return TwoStep(comm, self, numel)

    def wire_bytes(self, numel: int) -> int:
        """Bytes that stand for n elements: a multiple of 4, known to all ranks without asking; 0 for none."""
        raise NotImplementedError

    def encode_(self, c: Tensor, error: Tensor | None, wire: Tensor) -> None:
        """c ← c + error; ``wire`` ← what stands for c.

        Args:
            c: (n,) fp32, contiguous.
            error: the same, or None for zero.
            wire: (wire_bytes(n),) uint8, contiguous, at an address that 4 divides.
        """
        raise NotImplementedError

    def encode_sum_(self, c: Tensor, x: Tensor, error: Tensor | None, last: Tensor | None, wire: Tensor) -> None:
        """c ← x + error, or x + (error - C(error)) where ``last`` stands for ``error``; ``wire`` ← what stands for c.

        Args:
            c: (n,) fp32, contiguous; it may be ``error``, and then nobody wants the error as it was.
            x: (n,) fp32, bf16 or fp16; it does not change.
            last: only a codec that has ``one_pass`` is given it.
        """
        if last is not None:
            raise AssertionError(f"{self.name} does not take what is owed in one pass")
        if error is None:
            c.copy_(x)
        else:
            torch.add(x, error, out=c)
        self.encode_(c, None, wire)

    def encode_mean_(self, c: Tensor, wires: Tensor, error: Tensor | None, last: Tensor | None, wire: Tensor) -> None:
        """The same; x is the mean of what the rows of ``wires`` (D, w) stand for: 1/D Σ_r C(c_r)."""
        x = torch.empty_like(c) if error is not None and error.data_ptr() == c.data_ptr() else c
        self.mean_(x, wires)
        self.encode_sum_(c, x, error, last, wire)

    def mean_(self, out: Tensor, wires: Tensor) -> None:
        """``out`` (n,) fp32 ← the mean of what the rows of ``wires`` (D, w) stand for, added in their order."""
        size = self.wire_bytes(out.numel())
        for rank, wire in enumerate(wires):
            self.decode_(out, wire[:size], add=rank > 0)
        out.mul_(1.0 / len(wires))

    def decode_(self, out: Tensor, wire: Tensor, *, add: bool = False) -> None:
        """``out`` (n,) fp32 ← C(c), or ← out + C(c)."""
        raise NotImplementedError

    def owed_(self, error: Tensor, c: Tensor, wire: Tensor) -> None:
        """``error`` (n,) ← c - C(c), one rounding; it may be ``c``."""
        seen = torch.empty_like(c)
        self.decode_(seen, wire)
        torch.sub(c, seen, out=error)


def whole_words(num_bytes: int) -> int:
    """Rounded up to 4 bytes, so that what follows on the wire may be read as fp32."""
    return -(-num_bytes // 4) * 4
