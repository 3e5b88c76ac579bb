"""The largest elements, and nothing of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zoo.comm.compression.codec import Codec

if TYPE_CHECKING:
    from zoo.comm import Communicator
    from zoo.comm.compression.gathered import Gathered

Tensor = torch.Tensor


class TopK(Codec):
    """C(c) = c where |c_i| is among the k largest, else 0; k = max(1, ⌈ratio·n⌉). Stich et al. 2018, "Sparsified SGD
    with Memory". Among equals torch chooses, the same ones each time.

    Wire: k int32 places and k fp32 values. Ranks choose different elements, so sums are dense: every rank gathers what
    all others send (:class:`~zoo.comm.compression.gathered.Gathered`).
    """

    name = "top_k"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options.

        Attributes:
            ratio: k/n, above 0, at most 1.
        """

        ratio: float = 0.01

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        if not 0 < self.config.ratio <= 1:
            raise ValueError(f"TopK got ratio={self.config.ratio}; it must be above 0 and at most 1.")

    def reducer(self, comm: Communicator, numel: int) -> Gathered:
        """How tensors of n elements are averaged."""
        from zoo.comm.compression.gathered import Gathered

        if numel >= 1 << 31:
            raise ValueError(f"TopK got {numel:,} elements; places are int32, so it takes at most 2^31 - 1 at once.")
        return Gathered(comm, self, numel)

    def _k(self, numel: int) -> int:
        return min(numel, max(1, -int(-self.config.ratio * numel // 1)))

    def wire_bytes(self, numel: int) -> int:
        """See :class:`Codec`: 8·k."""
        return 8 * self._k(numel)

    def encode_(self, c: Tensor, error: Tensor | None, wire: Tensor) -> None:
        """See :class:`Codec`."""
        if error is not None:
            c.add_(error)
        k = self._k(c.numel())
        places = torch.topk(c.abs(), k, sorted=False).indices
        wire[: 4 * k].view(torch.int32).copy_(places)
        wire[4 * k :].view(torch.float32).copy_(c[places])

    def decode_(self, out: Tensor, wire: Tensor, *, add: bool = False) -> None:
        """See :class:`Codec`."""
        k = self._k(out.numel())
        places, values = wire[: 4 * k].view(torch.int32).long(), wire[4 * k :].view(torch.float32)
        if not add:
            out.zero_()
        out.index_add_(0, places, values)

    def owed_(self, error: Tensor, c: Tensor, wire: Tensor) -> None:
        """See :class:`Codec`."""
        k = self._k(c.numel())
        places, values = wire[: 4 * k].view(torch.int32).long(), wire[4 * k :].view(torch.float32)
        if error.data_ptr() != c.data_ptr():
            error.copy_(c)
        error.index_add_(0, places, values, alpha=-1)
