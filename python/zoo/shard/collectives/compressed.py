"""Reductions for optimizers that bring ranks together by themselves, and what they do not manage to say.

An optimizer that compresses its momentum (``zoo.optim.OnebitAdam``) needs, in most steps, gradients that are *not*
means over the ranks at which its states are repeated: all N ranks at stage 0, the N/p replicas of a shard group with
MiCS or HSDP. :class:`Own` is the reduction that stops there; :class:`Switched` chooses, backward by backward, between
it and the ordinary one. The mean of what the optimizer makes of its gradient is a :class:`CompressedMean`, one for each
bucket, with the errors of :mod:`zoo.comm.compression.errors`.

At pure stages 1 to 3 every element of the state has one owner: nothing is repeated, and what the owner sends back are
parameters. There the gradient itself goes to its owner compressed (:class:`CompressedLeg`), with an error at each rank.

Legend: P elements of a bucket, n those of a chunk; R ranks at which the states of an element are repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from zoo.comm import Communicator, Handle, Then
from zoo.comm.compression import Codec, ReduceLeg, TwoStep
from zoo.comm.handles import DONE
from zoo.cost.collectives import Hop
from zoo.layout import FlatLayout
from zoo.shard.collectives.feedback import GradientFeedback
from zoo.shard.collectives.routes import Feedback, FlatReduce, Reduce, Routes, Switch, WholeReduce
from zoo.shard.placement.packing import BucketSpec, layout_of
from zoo.shard.placement.placements import Placements

if TYPE_CHECKING:
    from zoo.shard.placement.axes import Axes


Tensor = torch.Tensor


class Own:
    """The gradient of this rank, or of its shard group, times R over the number of losses: means over R are means."""

    def __init__(self, inner: Reduce | None, scale: float) -> None:
        self._inner, self._scale = inner, scale

    def start(self, full: Tensor, out: Tensor, label: str) -> Handle:
        """See :class:`~zoo.shard.collectives.routes.Reduce`."""
        if self._inner is not None:
            return self._inner.start(full, out, label)
        if self._scale != 1.0:
            out.mul_(self._scale)
        return DONE

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`~zoo.shard.collectives.routes.Reduce`."""
        return self._inner.hops(numel, itemsize) if self._inner is not None else []


class Switched:
    """One of two reductions, as the switch says."""

    def __init__(self, switch: Switch, mean: Reduce, own: Reduce) -> None:
        self._switch, self.mean, self.own = switch, mean, own

    @property
    def _now(self) -> Reduce:
        return self.own if self._switch.own else self.mean

    def start(self, full: Tensor, out: Tensor, label: str) -> Handle:
        """See :class:`~zoo.shard.collectives.routes.Reduce`."""
        self._switch.left |= self._switch.own
        return self._now.start(full, out, label)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`~zoo.shard.collectives.routes.Reduce`: those of the next step."""
        return self._now.hops(numel, itemsize)


class CompressedMean:
    """The mean over R ranks of the parameters in [start, stop) of a bucket, compressed both ways.

    Errors are those of :mod:`zoo.comm.compression.errors`, without a loss scale; see
    :class:`~zoo.shard.collectives.routes.Feedback`. Padding is not sent: it would be part of the scale of its group.

    Attributes:
        used: the elements that it is the mean of.
    """

    has_loss_scale: ClassVar[bool] = False

    def __init__(self, comm: Communicator, codec: Codec, used: Used) -> None:
        self.unit, self.comm, self.used = 1.0, comm, used
        self._two_step = TwoStep(comm, codec, used.numel)
        self._mine = self._two_step.reduce.where(comm.rank)  # the used elements of which this rank is the server
        self.peers, self.pays = comm, True  # each server has a chunk of its own
        self.apart: Communicator | None = comm
        self.error_range, self.owed_range = (
            used.range_of(0, used.numel),
            used.range_of(self._mine.start, self._mine.stop),
        )

    @property
    def error(self) -> Tensor | None:
        """The worker error, as elements of the bucket."""
        value = self._two_step.worker.value
        return None if value is None else self.used.expanded(value, 0)

    @error.setter
    def error(self, value: Tensor | None) -> None:
        self._two_step.worker.value = None if value is None else self.used.packed(value, 0, self.used.numel)

    @property
    def owed(self) -> Tensor | None:
        """The server error, as elements of the bucket."""
        value = self._two_step.server.value
        return None if value is None else self.used.expanded(value, self._mine.start)

    @owed.setter
    def owed(self, value: Tensor | None) -> None:
        mine = self._mine
        self._two_step.server.value = None if value is None else self.used.packed(value, mine.start, mine.stop)

    def divisor(self, num_losses: int, num_ranks: int) -> int:
        """The mean is over ranks."""
        return num_ranks

    def start(self, x: Tensor, out: Tensor, label: str) -> Handle:
        """``out`` ← what all ranks see of the mean; of the used elements."""
        return self._two_step.start(x, out, label)

    def hops(self) -> list[Hop]:
        """The collectives of a mean."""
        size = self.comm.size * self._two_step.reduce.slot_bytes
        return [Hop("all_to_all", self.comm, size), Hop("all_gather", self.comm, size)] if size else []

    def commit(self) -> None:
        """See :class:`~zoo.shard.collectives.routes.Feedback`."""
        self._two_step.commit()

    def roll_back(self) -> None:
        """See :class:`~zoo.shard.collectives.routes.Feedback`."""
        self._two_step.roll_back()

    def forget(self) -> None:
        """See :class:`~zoo.shard.collectives.routes.Feedback`."""
        self.roll_back()
        self.error = self.owed = None

    def memory_bytes(self) -> int:
        """See :class:`~zoo.shard.collectives.routes.Feedback`."""
        return self._two_step.memory_bytes()


class CompressedLeg(GradientFeedback):
    """Gradients to their owners among the p ranks of a shard group, compressed; the way back is not."""

    def __init__(self, axes: Axes, switch: Switch, layout: FlatLayout) -> None:
        super().__init__(axes, layout, switch.unit)
        size, self._layout = axes.shard.size, layout
        self._leg = ReduceLeg(axes.shard, switch.codec, layout.size, chunk=layout.size // size)
        self._scale = size / axes.num_losses

    @property
    def error(self) -> Tensor | None:
        """(P,) of this rank."""
        return self._leg.worker.value

    @error.setter
    def error(self, value: Tensor | None) -> None:
        self._leg.worker.value = value

    def divisor(self, num_losses: int, num_ranks: int) -> int:
        """As that of a :class:`CompressedMean`."""
        return num_ranks

    def start(self, full: Tensor, out: Tensor, label: str) -> Handle:
        """See :class:`~zoo.shard.collectives.routes.Reduce`."""
        given = full if self._scale == 1.0 else full.float() * self._scale
        mean = torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        handle = self._paying(self._leg.start(given, mean, label), mean)

        def hand_over() -> None:
            out.copy_(mean)

        return Then([handle], hand_over)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`~zoo.shard.collectives.routes.Reduce`."""
        comm = self._leg.comm
        return [Hop("all_to_all", comm, comm.size * self._leg.slot_bytes)]

    def commit(self) -> None:
        """See :class:`~zoo.shard.collectives.routes.Feedback`."""
        super().commit()
        self._leg.commit()
        _forget_padding(self._layout, self.error, 0)

    def roll_back(self) -> None:
        """See :class:`~zoo.shard.collectives.routes.Feedback`."""
        super().roll_back()
        self._leg.roll_back()

    def memory_bytes(self) -> int:
        """See :class:`~zoo.shard.collectives.routes.Feedback`."""
        return self._leg.memory_bytes() + (self.owed.nbytes if self.owed is not None else 0)


def _forget_padding(layout: FlatLayout, error: Tensor | None, start: int) -> None:
    """A checkpoint does not have what lies between parameters, and the scales of groups feel it."""
    if error is None:
        return
    at = 0
    for piece in layout.slices(start, start + error.numel()):
        error[at : piece.offset] = 0
        at = piece.offset + piece.length
    error[at:] = 0


def left_to_the_optimizer(
    routes: Routes, spec: BucketSpec, placed: Placements, switch: Switch, predivide: float
) -> Routes:  # fmt: skip
    """Routes whose reduction the switch stops where the states are repeated.

    Parameters that ranks with other layers have too keep the ordinary one: they have no order in common in which all of
    their ranks could meet inside of an update.
    """
    axes = routes.axes
    if axes.world.size == 1 or axes.spans_layers:
        return routes
    layout = layout_of(spec, axes.shard.size)
    feedback: Feedback
    if not placed.states.is_split:
        mean: Reduce = WholeReduce(routes.reduce, axes.shard)
        own: Reduce = Own(None, axes.world.size / axes.num_losses)
        feedback = CompressedMean(axes.world, switch.codec, Used(layout, 0, layout.size))
    elif axes.replicas.size > 1:
        mean, own = routes.reduce, Own(FlatReduce(axes.shard, axes.num_losses // axes.replicas.size, predivide), 1.0)
        used = Used(layout, *layout.shard_range(axes.place, axes.shard.size))
        feedback = CompressedMean(axes.replicas, switch.codec, used)
    else:
        mean = routes.reduce
        own = feedback = CompressedLeg(axes, switch, layout)
    whole = not placed.states.is_split
    reduce = Switched(switch, mean, own)
    return replace(routes, reduce=reduce, feedback=feedback, reduces_whole=whole, switch=switch)


@dataclass(frozen=True)
class UsedRun:
    """``length`` elements from ``start`` of the bucket, which are those from ``at`` without padding."""

    start: int
    length: int
    at: int


class Used:
    """The elements of parameters in [start, stop) of a bucket, without padding: what is worth sending.

    Attributes:
        numel: how many.
    """

    def __init__(self, layout: FlatLayout, start: int, stop: int) -> None:
        self.start, self.stop, self._runs = start, stop, list[UsedRun]()
        self.numel = 0
        for piece in layout.slices(start, stop):
            first = start + piece.offset
            if self._runs and self._runs[-1].start + self._runs[-1].length == first:
                last = self._runs.pop()
                self._runs.append(UsedRun(last.start, last.length + piece.length, last.at))
            else:
                self._runs.append(UsedRun(first, piece.length, self.numel))
            self.numel += piece.length

    def within(self, start: int, stop: int) -> list[UsedRun]:
        """The runs inside of [start, stop) of the bucket."""
        found = []
        for run in self._runs:
            low, high = max(run.start, start), min(run.start + run.length, stop)
            if low < high:
                found.append(UsedRun(low, high - low, run.at + low - run.start))
        return found

    def range_of(self, first: int, last: int) -> tuple[int, int]:
        """[start, stop) of the bucket from used element ``first`` to before used element ``last``."""
        found = list(self._between(first, last))
        return (found[0].start, found[-1].start + found[-1].length) if found else (self.start, self.start)

    def expanded(self, values: torch.Tensor, first: int) -> torch.Tensor:
        """``values`` of the used elements from ``first`` on as elements of the bucket, 0 in between."""
        low, high = self.range_of(first, first + values.numel())
        found = values.new_zeros(high - low)
        for run in self._between(first, first + values.numel()):
            found[run.start - low : run.start - low + run.length] = values[run.at - first : run.at - first + run.length]
        return found

    def packed(self, values: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """The other way round."""
        low, _ = self.range_of(first, last)
        parts = [values[run.start - low : run.start - low + run.length] for run in self._between(first, last)]
        return torch.cat(parts) if parts else values.new_empty(0)

    def _between(self, first: int, last: int) -> Iterator[UsedRun]:
        for run in self._runs:
            low, high = max(run.at, first), min(run.at + run.length, last)
            if low < high:
                yield UsedRun(run.start + low - run.at, high - low, low)
