"""Optimizers that bring ranks together inside of their update: the other ranks, when these meet (:class:`Meetings`),
and what that asks of a ZeRO optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zoo.comm import Communicator, Handle, Then, advance
from zoo.cost.collectives import Hop
from zoo.shard.buckets import Bucket
from zoo.shard.collectives.compressed import CompressedLeg, CompressedMean
from zoo.shard.collectives.routes import Switch
from zoo.shard.offload.tiers import Tier
from zoo.zero.update.segments import Segment
from zoo.zero.update.tensor_collectives import BucketParts
from zoo.zero.update.trial import without_params

Tensor = torch.Tensor
_log = logging.getLogger("zoo.zero")
COUNTER = "zero/counter/"
"""Before the name of what the groups of an optimizer count, among the numbers that are saved."""


def switch_for(optimizer: Any, groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Switch:
    """What leaves gradients to an optimizer that brings ranks together by itself (``synchronises``)."""
    made = optimizer([{**without_params(g), "params": [torch.zeros(2).requires_grad_()]} for g in groups], **options)
    return Switch(codec=made.codec, unit=made.gradient_unit)


def cannot_be_sent(buckets: Sequence[Bucket], optimizer: Any) -> NotImplementedError | None:
    """What is wrong with offloading for an optimizer that brings ranks together by itself; None for nothing."""
    off = any(b.updates_off_device or b.placements.states.tier is not Tier.DEVICE for b in buckets)
    if not off or all(b.routes.feedback is None for b in buckets):
        return None
    return NotImplementedError(
        f"offload_optimizer with {optimizer.__name__}, which sends what it updates: that has to be where the "
        "gradients are. Leave one of the two out."
    )


def tell_ratio(buckets: Sequence[Bucket], name: str, total_bytes: int, reduce_dtype: torch.dtype | None) -> None:
    """Log what is saved where gradients are compressed on their way to their owners, and nothing else is.

    Args:
        total_bytes: of a step whose gradients are means, sent by this rank.
    """
    legs = [b for b in buckets if isinstance(b.routes.feedback, CompressedLeg) and b.routes.axes.shard.size > 1]
    if not legs:
        return
    before = after = 0
    for bucket in legs:
        reduce: Any = bucket.routes.reduce
        itemsize = (reduce_dtype or bucket.spec.gradient_dtype).itemsize
        before += sum(hop.sent()[0] for hop in reduce.mean.hops(bucket.layout.size, itemsize))
        after += sum(hop.sent()[0] for hop in reduce.own.hops(bucket.layout.size, itemsize))
    left = total_bytes - before + after
    _log.info(
        "%s with states that are split over all %d ranks: a step that compresses sends gradients in 1/%.1f of the "
        "bytes (%s instead of %s a rank), and parameters as before: 1/%.2f of all it sends (%s instead of %s).",
        name, legs[0].routes.axes.shard.size, before / after, f"{after:,}", f"{before:,}", total_bytes / left,
        f"{left:,}", f"{total_bytes:,}",
    )  # fmt: skip


def peers_for(
    everyone: Communicator, options: dict[str, Any], *, whole: bool
) -> tuple[BucketParts | None, dict[str, Any]]:  # fmt: skip
    """What brings ranks together inside of an update, and the options with it. Only with somebody to meet."""
    if everyone.size == 1:
        return (BucketParts() if whole else None), options
    peers = BucketPeers(everyone, by_tensor=whole)
    return peers, {**options, "peers": peers}


class BucketPeers(BucketParts):
    """The ``peers=`` (``zoo.optim.synced``) of an optimizer, and its ``parts=`` where it needs these.

    Calls are about the buckets of the current piece, which are the same on every rank. Each bucket has a mean of its
    own, with its errors. A bucket whose gradients come as means anyway (:func:`~zoo.shard.collectives.compressed.
    left_to_the_optimizer`) has none: all ranks that have its elements make the same of them.

    Args:
        everyone: all ranks with this optimizer.
        by_tensor: it needs parts.
    """

    def __init__(self, everyone: Communicator, *, by_tensor: bool) -> None:
        super().__init__()
        self._everyone, self._by_tensor = everyone, by_tensor
        self._segments: dict[int, Segment] = {}
        self._device = torch.device("cpu")

    def adopt(self, segments: Sequence[Segment], buckets: Sequence[Bucket]) -> None:
        """These are the parameters that the optimizer gets, of these buckets. Collective."""
        self._segments = {id(segment.tensor): segment for segment in segments}
        self._device = next((bucket.device for bucket in buckets), self._device)
        if self._by_tensor:
            super().adopt(segments, buckets)

    def numel(self, param: Tensor) -> int:
        """See ``zoo.optim.synced.Peers``."""
        return sum(piece.length for piece in self._segments[id(param)].slices())

    def compressed_mean(self, params: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """See ``zoo.optim.synced.Peers``."""

        def start(mean: CompressedMean, bucket: Bucket, x: Tensor) -> Handle:
            return mean.start(x, x, f"momentum of {bucket.label}")

        return self._each(params, values, start)

    def mean(self, params: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """See ``zoo.optim.synced.Peers``."""

        def start(mean: CompressedMean, bucket: Bucket, x: Tensor) -> Handle:
            return Then([mean.comm.all_reduce(x)], lambda: _multiply(x, 1.0 / mean.comm.size))

        return self._each(params, values, start)

    def _each(
        self, params: Sequence[Tensor], values: Sequence[Tensor],
        start: Callable[[CompressedMean, Bucket, Tensor], Handle],
    ) -> list[Tensor]:  # fmt: skip
        """What ``start`` makes, in place, of the values of each bucket that has a mean, without padding."""
        found, spread = list(values), list[tuple[Tensor, Tensor]]()
        handles: list[Handle] = []
        for bucket in self._buckets:
            mean = _mean_of(bucket)
            if mean is None or not mean.used.numel:
                continue
            x = torch.empty(mean.used.numel, dtype=torch.float32, device=bucket.device)
            for i, low, high in self._places(bucket, params):
                runs = mean.used.within(low, high)
                for run in runs:
                    x[run.at : run.at + run.length] = values[i][run.start - low : run.start - low + run.length]
                if len(runs) == 1 and runs[0].length == high - low:
                    found[i] = x[runs[0].at : runs[0].at + runs[0].length]
                    continue
                found[i] = torch.zeros(high - low, dtype=torch.float32, device=bucket.device)
                spread += [
                    (found[i][run.start - low : run.start - low + run.length], x[run.at : run.at + run.length])
                    for run in runs
                ]
            for older in handles:
                advance(older)
            handles.append(start(mean, bucket, x))
        for handle in handles:
            handle.wait()
        for to, part in spread:
            to.copy_(part)
        return found

    def total(self, values: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
        """See ``zoo.optim.synced.Peers``; of all buckets, on all layers."""
        mine = torch.zeros(1, dtype=torch.float64, device=self._device)
        for param, value in zip(params, values, strict=True):
            bucket = self._segments[id(param)].bucket
            if bucket.routes.axes.counts:
                mine += value.double().sum().to(mine.device) / bucket.placements.states.repeat.size
        self._everyone.all_reduce(mine).wait()
        return mine[0]

    def _places(self, bucket: Bucket, params: Sequence[Tensor]) -> list[tuple[int, int, int]]:
        """Which of ``params`` are in a bucket, and which of its elements: (index, start, stop)."""
        segments = [(i, self._segments[id(param)]) for i, param in enumerate(params)]
        return [(i, s.first, s.first + s.stop - s.start) for i, s in segments if s.bucket is bucket]


def sent_by_peers(bucket: Bucket, sync: Any, *, compresses: bool) -> list[Hop]:
    """The collectives of a bucket in a step that synchronises this (``zoo.optim.sync_policy.Sync``)."""
    mean = _mean_of(bucket)
    if mean is None or not mean.used.numel:
        return []
    whole = [Hop("all_reduce", mean.comm, 4 * mean.used.numel)]
    found = mean.hops() if sync.momentum else []
    if sync.parameters:
        found = mean.hops() if compresses else whole
    return found


def _multiply(x: Tensor, factor: float) -> None:
    x.mul_(factor)


def _mean_of(bucket: Bucket) -> CompressedMean | None:
    feedback = bucket.routes.feedback
    return feedback if isinstance(feedback, CompressedMean) else None


def _are_apart(meetings: weakref.ref[Meetings]) -> bool:
    """A model keeps this, and must not keep its optimizer by it."""
    known = meetings()
    return known is not None and not known.agreed


class Meetings:
    """Drives a ``zoo.optim.synced.SyncedOptimizer``, and tells the reductions whether it wants means.

    Args:
        inner: the optimizer on this rank's segments.
        switch: what reductions look at.
        everyone: all ranks with this optimizer.

    Raises:
        ValueError: ranks with other layers would meet in other steps.
        NotImplementedError: ranks would step by themselves where none has all that it needs for that.
    """

    def __init__(
        self, inner: Any, switch: Switch, buckets: Sequence[Bucket], segments: Sequence[Segment], everyone: Communicator
    ) -> None:  # fmt: skip
        self._inner, self._switch, self._everyone = inner, switch, everyone
        self._buckets, self._segments = buckets, segments
        inner.driven = True
        split = any(b.placements.states.repeat.size == 1 and b.routes.axes.world.size > 1 for b in buckets)
        every = everyone.all_gather_object((inner.meetings(), split))
        self._split_anywhere = any(split for _, split in every)
        if len({told for told, _ in every}) > 1:
            raise ValueError(
                "ranks with other layers of the model bring their optimizers together in other steps: "
                f"{', '.join(sorted({told for told, _ in every}))}. Construct all of them with the same options."
            )
        self._check_local_steps()
        for bucket in buckets:
            if bucket.placements.states.repeat.size > 1 and bucket.routes.feedback is not None:
                bucket.apart = functools.partial(_are_apart, weakref.ref(self))

    # A step ----------------------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Gradients may be reduced for the next step: whether to means, by the options that the optimizer has now."""
        self._switch.decide(own=not self._inner.takes_means(), afresh=not self._has_reduced())

    def begin(self) -> None:
        """A step begins.

        Raises:
            ValueError: gradients were left to an optimizer that takes means now.
        """
        self._check_local_steps()
        if self._switch.left and self._has_reduced() and self._inner.takes_means():
            raise ValueError(
                "the step takes the mean gradient of all ranks, and the gradients are not: "
                f"{type(self._inner).__name__} was to compress when they were reduced, and its options or its state "
                "have changed since. Call zero_grad() and backward again; change options between zero_grad() and "
                "backward."
            )
        self._inner.begin_step()

    def _check_local_steps(self) -> None:
        """Raise NotImplementedError, on all ranks, for steps of a rank where none has all that it needs for them."""
        if self._split_anywhere and self._inner.steps_by_itself():
            raise NotImplementedError(
                f"{type(self._inner).__name__} with local steps, after which each rank has parameters of its own, and "
                "states that are split over all ranks, which have parameters only together. Use stage 0, groups of "
                "mics_shard_size ranks, or no local steps (local_step_clipper=1)."
            )

    @contextlib.contextmanager
    def forming(self) -> Iterator[None]:
        """Steps inside make states, meet nobody and do not count."""
        self._inner.forming = True
        try:
            self._inner.begin_step()
            yield
        finally:
            self._inner.forming = False

    def resume(self, *, anew: bool = False) -> None:
        """States were loaded; ranks whose segments are padding do not see in them how many steps. Collective.

        With ``anew`` what ranks had moved by themselves was forgotten.
        """
        states = [self._inner.state.get(s.tensor, {}) for s in self._segments if s.slices()]
        mine = max((int(state["step"]) for state in states if "step" in state), default=0)
        self._inner.resume(max(self._everyone.all_gather_object(mine)))
        if anew:
            self._inner.round_begun()

    def counters(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """What the groups, all alike, have counted."""
        return {f"{COUNTER}{name}": float(groups[0][name]) for name in self._inner.counters()} if groups else {}

    def take_counters(self, scalars: Mapping[str, float], groups: Sequence[dict[str, Any]]) -> None:
        """The groups have counted what was saved."""
        for name, like in self._inner.counters().items():
            if f"{COUNTER}{name}" in scalars:
                for group in groups:
                    group[name] = type(like)(scalars[f"{COUNTER}{name}"])

    def _has_reduced(self) -> bool:
        return any(b.gradients is not None and b.gradients.reduced for b in self._buckets)

    # What ranks have in common ---------------------------------------------------------------------------------------

    @property
    def apart(self) -> bool:
        """Ranks that repeat a state have different ones after the steps so far."""
        return self._everyone.size > 1 and not self._inner.together()

    @property
    def agreed(self) -> bool:
        """All ranks have the same parameters after the steps so far."""
        return self._everyone.size == 1 or self._inner.agreed()

    def check_writable(self) -> None:
        """Raise RuntimeError where values for parameters would be those of one rank, or undone.

        Between steps at which ranks agree each has parameters of its own, and the next agreement starts from others.
        """
        if not self._inner.agreed():
            raise RuntimeError(
                f"parameters cannot be written to between two steps at which the ranks of {type(self._inner).__name__} "
                "agree on them: each rank has its own now, and what is written would be lost. Write after a step that "
                "ends with an agreement, before the first step, or into a checkpoint."
            )

    def hops(self) -> list[Hop]:
        """What the next step sends to bring ranks together."""
        now, compresses = self._inner.now, self._inner.compressor is not None
        found = [hop for b in self._buckets for hop in sent_by_peers(b, now, compresses=compresses)]
        return found + [Hop("all_reduce", self._everyone, 8)] * (self._everyone.size > 1 and self._inner.asks_for_total)
