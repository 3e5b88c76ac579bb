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
