"""A reduction with memory: what a lossy one leaves out is added to what it is given next time.

Legend: N ranks, P elements of a bucket, n = P / p those of a rank's chunk; g_r the gradient of rank r, C what the
others see of what a rank sends.

    c_r = g_r + e_r,   mean = 1/N Σ_r C(c_r),   e_r' = c_r - C(c_r)

so that what was sent and what is kept is what was given, C(c_r) + e_r' = g_r + e_r, up to one fp32 rounding a side.

The new error is *prepared* by the reduction and *committed* by the step: a step that is skipped, and gradients that are
dropped, leave e_r as it was. Several reductions before one step follow each other. The error is a logical tensor for
each rank and parameter (role ``feedback.<rank>``, with the rank among those between which the parameter travels). At
another number of ranks nothing of it is lost: whoever owns an element of the sharded gradient owes s = 1/N Σ_r e_r
(role ``owed``), adds it to the next mean, and e_r begins at zero. Means that an optimizer makes inside of its update
(``compressed.py``) keep theirs in the same form.

Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
Speech DNNs", section 3; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
algorithm 2. Here ranks compress for themselves, and the sum is that of what they sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch

from zoo.comm import Communicator, Handle, Then
from zoo.cost.collectives import Hop
from zoo.shard.collectives.routes import Reduce

if TYPE_CHECKING:
    from zoo.layout import FlatLayout
    from zoo.shard.placement.axes import Axes


class GradientFeedback:
    """Base of reductions of gradients to their owners that keep errors, of all ranks: a
    :class:`~zoo.shard.collectives.routes.Feedback`.

    Args:
        axes, layout: of the bucket.

    Attributes:
        owed: (n,) fp32, what this rank's chunk of the next mean has to be increased by; None for nothing.
    """

    has_loss_scale: ClassVar[bool] = True
    apart: Communicator | None = None
    error: torch.Tensor | None

    def __init__(self, axes: Axes, layout: FlatLayout, unit: float = 1.0) -> None:
        self.unit, self._paid = unit, False
        self.owed: torch.Tensor | None = None
        self.peers, self.error_range = axes.world, (0, layout.size)
        self.owed_range = layout.shard_range(axes.place, axes.shard.size)
        self.pays = axes.replicas.rank == 0  # replicas add up what they get

    def divisor(self, num_losses: int, num_ranks: int) -> int:
        """The mean is over losses."""
        return num_losses

    def _paying(self, handle: Handle, out: torch.Tensor) -> Handle:
        """``out``, which comes with ``handle``, is increased by what is owed: once before a commit."""
        owed = None if self._paid else self.owed
        if owed is None:
            return handle
        self._paid, due = True, owed

        def pay() -> None:
            out.add_(due)

        return Then([handle], pay)

    def commit(self) -> None:
        """The step has used the reduced gradient."""
        if self._paid:
            self.owed, self._paid = None, False

    def roll_back(self) -> None:
        """The reduced gradient is not used."""
        self._paid = False

    def forget(self) -> None:
        """See :class:`~zoo.shard.collectives.routes.Feedback`."""
        self.roll_back()
        self.error = self.owed = None


class Lossy(GradientFeedback):
    """A lossy reduction with its errors.

    Args:
        inner: the reduction; it compresses what it is given.
        seen: C, what all ranks see of it: (P,) fp32 → (P,) fp32.
        axes, layout: of the bucket.

    Attributes:
        error: (P,) fp32, e_r; None before the first step, which is zero.
    """

    def __init__(
        self, inner: Reduce, seen: Callable[[torch.Tensor], torch.Tensor], axes: Axes, layout: FlatLayout
    ) -> None:
        super().__init__(axes, layout)
        self._inner, self._seen = inner, seen
        self.error: torch.Tensor | None = None
        self._prepared: torch.Tensor | None = None

    def start(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Handle:
        """See :class:`~zoo.shard.collectives.routes.Reduce`."""
        given = full.to(torch.float32, copy=True)
        before = self._prepared if self._prepared is not None else self.error
        if before is not None:
            given.add_(before)
        self._prepared = given - self._seen(given)
        return self._paying(self._inner.start(given, out, label), out)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`~zoo.shard.collectives.routes.Reduce`."""
        return self._inner.hops(numel, itemsize)

    def commit(self) -> None:
        """See :class:`~zoo.shard.collectives.routes.Feedback`."""
        super().commit()
        if self._prepared is not None:
            self.error, self._prepared = self._prepared, None

    def roll_back(self) -> None:
        """See :class:`~zoo.shard.collectives.routes.Feedback`."""
        super().roll_back()
        self._prepared = None

    def memory_bytes(self) -> int:
        """See :class:`~zoo.shard.collectives.routes.Feedback`."""
        return sum(t.nbytes for t in (self.error, self.owed, self._prepared) if t is not None)
