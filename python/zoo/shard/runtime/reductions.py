"""The reductions of a backward: in one order on every rank, the last buckets first, a few under way at a time.

Gradients of parameters that ranks with other layers have too (``Axes.spans_layers``) wait for the step: the backwards
of those ranks do not keep step with ours, and one that waited for theirs might never send what they wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from zoo.shard.buckets import Bucket
from zoo.shard.gradients import BucketGradients
from zoo.shard.runtime.executor import Executor


class Follower(Protocol):
    """Who uses reduced gradients before backward ends. Called at the same points of the program on every rank."""

    def reduced(self, bucket: Bucket) -> None:
        """The gradient of ``bucket`` is the mean over all ranks now."""

    def finish(self) -> None:
        """All gradients are."""

    def abandon(self) -> None:
        """The backward ended with an exception, or its gradients are dropped."""


class Reductions:
    """What of the trainable buckets is reduced already.

    Args:
        buckets: all of them, in order.
        executor: reduces them.
        reduce_dtype: dtype in which gradients travel, None for their own.
        num_in_flight: reductions under way before the oldest is waited for.

    Attributes:
        begins: called when a backward that reduces has started.
        follower: is told of each gradient that is reduced.
        waits: there are buckets that a backward does not reduce.
    """

    def __init__(
        self, buckets: Sequence[Bucket], executor: Executor, *, reduce_dtype: torch.dtype | None,
        num_in_flight: int = 2,
    ) -> None:  # fmt: skip
        self._executor = executor
        self.begins: Callable[[], None] | None = None
        self.follower: Follower | None = None
        every = [b.gradients for b in reversed(buckets) if b.gradients is not None]
        self._all = [g for g in every if not g.bucket.routes.axes.spans_layers]
        # In an order that is the same on ranks with other layers.
        self._tied = sorted((g for g in every if g.bucket.routes.axes.spans_layers), key=_place)
        self.waits = bool(self._tied)
        self._next = 0
        self._begun = False
        self._in_flight: deque[tuple[BucketGradients, Callable[[], None]]] = deque()
        self._reduce_dtype, self._num_in_flight = reduce_dtype, num_in_flight

    def begin(self) -> None:
        """A backward that reduces starts."""
        self._next = 0
        if not self._begun:
            if self.begins is not None:
                self.begins()
            self._begun = True

    def launch_ready(self, is_over: Callable[[Bucket], bool]) -> None:
        """Begin the reductions whose turn it is; ``is_over``: nothing will be added to the gradients of a bucket."""
        every = self._all
        while self._next < len(every) and is_over((gradients := every[self._next]).bucket):
            self._launch(gradients)
            self._next += 1

    def _launch(self, gradients: BucketGradients) -> None:
        alone = gradients.bucket.routes.axes.world.size == 1
        if alone and not self._in_flight:  # it is over at once
            self._executor.reduce(gradients.bucket, self._reduce_dtype)()
            if self.follower is not None:
                self.follower.reduced(gradients.bucket)
            return
        while len(self._in_flight) >= self._num_in_flight:
            self._land()
        for older, _ in self._in_flight:
            older.advance()
        self._in_flight.append((gradients, self._executor.reduce(gradients.bucket, self._reduce_dtype)))
        if alone:
            self._land()

    def _land(self) -> None:
        gradients, finish = self._in_flight.popleft()
        finish()
        if self.follower is not None:
            self.follower.reduced(gradients.bucket)

    def finish(self) -> None:
        """Reduce every bucket that is not reduced yet, and wait for all of it."""
        if not self._begun:
            self.begin()
        self.launch_ready(_always)
        while self._in_flight:
            self._land()
        for gradients in self._all:
            gradients.settle()
        self._next, self._begun = 0, False
        if self.follower is not None:
            self.follower.finish()

    def finish_tied(self) -> None:
        """Reduce those, on all ranks that have them."""
        for gradients in self._tied:
            self._launch(gradients)
        while self._in_flight:
            self._land()
        for gradients in self._tied:
            gradients.settle()

    def abandon(self) -> None:
        """Give up what is under way, once it no longer reads or writes memory."""
        self._next, self._begun = 0, False
        flying = list(self._in_flight)
        self._in_flight.clear()
        try:
            for gradients, _ in flying:
                gradients.ground()
        finally:
            if self.follower is not None:
                self.follower.abandon()


def _place(gradients: BucketGradients) -> tuple[Any, int]:
    return gradients.bucket.spec.axes, gradients.bucket.index


def _always(bucket: Bucket) -> bool:
    return True


class Demand:
    """Every trainable parameter must get a gradient in each backward that reduces."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.hooks: list[Any] = []
        every = set()
        for bucket in (b for b in buckets if b.spec.trainable):
            for slot, parameter in enumerate(bucket.spec.parameters):
                every.add((bucket, slot))
                seen: Callable[[Any], None] = partial(self.saw, bucket, slot)
                self.hooks.append(parameter.register_post_accumulate_grad_hook(seen))  # type: ignore[no-untyped-call]
        self._all, self._unseen = frozenset(every), every

    def saw(self, bucket: Bucket, slot: int, parameter: torch.Tensor | None = None) -> None:
        """A gradient has arrived for this parameter."""
        self._unseen.discard((bucket, slot))

    def check(self) -> None:
        """The backward is over.

        Raises:
            ValueError: a parameter got none.
        """
        missing, self._unseen = sorted(bucket.called(slot) for bucket, slot in self._unseen), set(self._all)
        if missing:
            raise ValueError(
                f"{len(missing)} trainable parameter(s) got no gradient in backward: {', '.join(missing[:5])}. Use "
                "them in the loss, freeze them, or leave ignore_unused_parameters=True, which takes their gradients as "
                "zero."
            )
