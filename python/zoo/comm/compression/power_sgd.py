"""A product of two thin matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from zoo.comm.communicator import Communicator
from zoo.comm.compression.errors import Owed
from zoo.comm.compression.reducer import Reducer
from zoo.comm.handles import Handle, Then

Tensor = torch.Tensor


class PowerSGD:
    """C(c) = P Qᵀ for c as a matrix M, of rank r: one step of power iteration, which begins where the last one ended.

        P = 1/D Σ_r M_r Q,   P ← orthogonal columns of P,   Q ← 1/D Σ_r M_rᵀ P,   mean = P Qᵀ,   e_r = M_r - mean

    Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", algorithm 1
    (with warm start) and 2 (error feedback). Both sums are ordinary all-reduces, of r·(rows + columns) numbers.
    """

    name = "power_sgd"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options.

        Attributes:
            rank: r.
            columns: of the matrix that a flat tensor is seen as, the last row filled up with zeros; None: as square as
                can be. A weight's own number of columns finds more structure.
            seed: of the first Q, the same on all ranks.
        """

        rank: int = 4
        columns: int | None = None
        seed: int = 0

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        for name in ("rank", "columns"):
            given = getattr(self.config, name)
            if given is not None and given < 1:
                raise ValueError(f"PowerSGD got {name}={given}; it must be at least 1.")

    def reducer(self, comm: Communicator, numel: int) -> PowerSGDReducer:
        """How tensors of n elements are averaged."""
        return PowerSGDReducer(comm, self.config, numel)


class PowerSGDReducer(Reducer):
    """The mean of (n,) over the ranks, of rank r.

    Attributes:
        q: (columns, r), where the next iteration begins; the same bits on all ranks.
    """

    worker: Owed

    def __init__(self, comm: Communicator, config: PowerSGD.Config, numel: int) -> None:
        super().__init__(comm, numel, Owed())
        self.columns = config.columns or max(1, math.isqrt(max(numel - 1, 0)) + 1)
        self.rows = -(-numel // self.columns)
        self.rank = min(config.rank, self.rows, self.columns)
        generator = torch.Generator().manual_seed(config.seed)
        self.q = torch.randn(self.columns, self.rank, generator=generator)
        self._next_q: Tensor | None = None

    def _begin(self, x: Tensor, out: Tensor, label: str) -> Handle:
        c = self.worker.added(x)
        missing = self.rows * self.columns - self.numel
        matrix = (F.pad(c, (0, missing)) if missing else c).view(self.rows, self.columns)
        q = self._next_q if self._next_q is not None else self.q
        # Thin matrices lie on their side: products with them are two to eight times as fast so.
        p = q.to(c.device).t() @ matrix.t()
        handle = self.comm.all_reduce(p)

        def second() -> Handle:
            basis = orthogonal(p.t())
            found = basis.t() @ matrix
            more = self.comm.all_reduce(found)

            def unpack() -> None:
                found.mul_(1.0 / self.comm.size)
                if missing:
                    out.copy_((basis @ found).view(-1)[: self.numel])
                else:
                    torch.mm(basis, found, out=out.view(self.rows, self.columns))
                self._next_q = found.t()
                self.worker.prepare(c.sub_(out))

            return Then([more], unpack)

        return Then([handle], second, staged=True)

    def sent_bytes(self) -> int:
        """See :class:`Reducer`; by rings 2·4·r·(rows + columns)·(D-1)/D."""
        return 2 * 4 * self.rank * (self.rows + self.columns) * (self.comm.size - 1) // self.comm.size

    def commit(self) -> None:
        """See :class:`Reducer`; the new Q counts too."""
        super().commit()
        if self._next_q is not None:
            self.q, self._next_q = self._next_q, None

    def roll_back(self) -> None:
        """See :class:`Reducer`; Q too is what it was."""
        super().roll_back()
        self._next_q = None


def orthogonal(p: Tensor) -> Tensor:
    """Orthonormal columns that span those of (m, r), and others where they are dependent; NaN where p is not finite."""
    if not bool(torch.isfinite(p).all()):
        return torch.full_like(p, math.nan)
    basis: Tensor = torch.linalg.qr(p).Q
    return basis
