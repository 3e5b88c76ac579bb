"""The walk of a backward through contexts: what it gathers, releases and reduces on its way, in the context's order.

It knows nothing of autograd: :class:`~zoo.shard.runtime.backward.Backward` says how far to go, and so does a plan.

Reductions come in one order on every rank, the last buckets first, a few under way at a time. Gradients of parameters
that ranks with other layers have too (``Axes.spans_layers``) wait for the step: the backwards of those ranks do not
keep step with ours, and one that waited for theirs might never send what they wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from zoo.parts.hooks import own_hook
from zoo.shard.buckets import Bucket
from zoo.shard.gradients import BucketGradients, GradientPhase
from zoo.shard.runtime.contexts import BackwardPart, Context, Contexts, Phase, Unit
from zoo.shard.runtime.executor import Executor
from zoo.shard.runtime.residency import Residency

_ACCUMULATING = GradientPhase.ACCUMULATING
Launch = Callable[[Callable[[Bucket], bool]], None]


class Walk:
    """Goes back through contexts.

    Args:
        partitioned: some parameters of the model are.
        launch: begins the reductions whose turn it is, given what says whether nothing will be added to a bucket's
            gradient any more.
        divergent: every rank goes its own way, and skips what nothing leads to.

    Attributes:
        at: the context that it is in. visited: those that it has been in.
        accumulates: gradients of parameters are added up. launches: reductions begin on the way.
        awaited: buckets of units that did not run, to whose gradients something is added.
    """

    def __init__(
        self, contexts: Contexts, residency: Residency, executor: Executor, *, partitioned: bool, launch: Launch,
        divergent: bool = False,
    ) -> None:  # fmt: skip
        self._contexts, self._residency, self._executor = contexts, residency, executor
        self._partitioned, self._launch, self._divergent = partitioned, launch, divergent
        self.accumulates = self.launches = False
        self.at: Context | None = None
        self.visited: list[Context] = []
        self.awaited: set[Bucket] = set()
        self._done: set[Bucket] = set()  # no context that this backward goes through needs them any more
        self._newly_done = True  # some are, or may be from the beginning, since reductions were last launched
        self._drives = False
        self._order: list[Bucket] = []  # that the calls of a context need, the latest first
        self._starts: list[int] = []  # by call, where in it that of the calls before it begins
        self._last = -1  # the call that is the last one in backward to need partitioned buckets
        self._unread: set[Bucket] = set()  # released while autograd adds to their gradients
        self.used: set[Bucket] = set()
        """By the context that a schedule drives."""
        self.read_last: frozenset[Bucket] = frozenset()
        """What a compiled graph reads although autograd has not saved it."""

    def begin(self, *, accumulates: bool, launches: bool) -> None:
        """A backward begins, which finds its contexts."""
        self.accumulates, self.launches, self._drives = accumulates, launches, False
        self.read_last = frozenset()
        self.at = None
        self.visited.clear()
        self.awaited.clear()
        self._done.clear()
        self._unread.clear()
        self._newly_done = True

    def drive(self, context: Context, part: BackwardPart, *, launches: bool) -> None:
        """A backward begins that goes through this context and nothing else."""
        self.begin(accumulates=part is not BackwardPart.INPUTS, launches=launches)
        self._turn_to(context)
        self._drives = True
        self.used = {bucket for _, bucket in context.uses}
        # Gradients of weights are brought by the caller: there is nothing to go through.
        if part is BackwardPart.WEIGHTS:
            context.cursor = 0

    def _turn_to(self, context: Context) -> None:
        context.cursor = len(context.calls)
        self.at = context
        if self._partitioned:
            self._last = next((i for i, unit in enumerate(context.calls) if unit.partitioned), -1)
        if self._residency.prefetches:
            self._order, self._starts = [], [0] * len(context.calls)
            for index in range(len(context.calls) - 1, -1, -1):
                self._order += context.calls[index].partitioned
                self._starts[index] = len(self._order)

    def arrive(self) -> Context:
        """A driven backward goes to the beginning of its context."""
        context = self.at
        if context is None:
            raise AssertionError("no backward is driven.")
        self.to(context, 0)
        self._finish(context, 0)
        return context

    def again(self) -> None:
        """A driven backward goes through its context once more."""
        context = self.arrive()
        self._contexts.lease_again(context)
        context.cursor = len(context.calls)

    def go_to(self, context: Context) -> None:
        """From now on it is in ``context``, at its end."""
        self._turn_to(context)
        self.visited.append(context)
        if self.accumulates:
            for bucket in context.returned:
                if bucket.gradients is not None:
                    bucket.gradients.expect()

    def leave(self) -> None:
        """It is through with the context it is in."""
        context = self.at
        if context is not None:
            if context.cursor > 0 and not self._divergent:
                self.to(context, 0)
            self._finish(context, 0)
            self._unread.clear()
            context.phase = Phase.WALKED
        self.at = None

    def to(self, context: Context, index: int) -> None:
        """Go back to call ``index``, through every call after it that backward has not visited.

        Each call is treated alike whether its hook fired or not. A call is skipped when its output is the very tensor
        that another unit returned (a model returns what its last layer does), or when on this rank nothing of it led
        to the loss; other ranks may need it all the same.
        """
        if self._divergent:
            self._finish(context, index + 1)
            called = context.calls[index]
            for unit in context.calls[index + 1 : context.cursor]:
                if unit in called.within:  # it returns the very tensor of `called`, whose hook came first
                    self.open(unit)
            context.cursor = index
            self.open(called)
            return
        calls, uses = context.calls, context.uses
        while context.cursor > index:
            context.cursor = cursor = context.cursor - 1
            if context.left and uses[context.left - 1][0] > cursor:
                self._finish(context, cursor + 1)
            unit = calls[cursor]
            if self._executor.watchers:
                self._executor.moved()
            if unit.partitioned:
                self.open(unit)
                if self._residency.prefetches:
                    self._residency.prefetch(self._order, self._starts[cursor])
                if cursor == self._last:
                    self._release_unread(context, unit)
            elif self.accumulates:
                for gradients in unit.gradients:
                    if gradients.phase is not _ACCUMULATING:  # most often it is: a call less
                        gradients.expect()
            if self._newly_done and self.launches:
                self._newly_done = False
                self._launch(self.is_over)

    def open(self, unit: Unit) -> None:
        """The backward of a call of ``unit`` is next."""
        for bucket in unit.partitioned:
            self._residency.need(bucket)
            self._executor.wait(bucket)
        if self.accumulates:
            for gradients in unit.gradients:
                gradients.expect()

    def _release_unread(self, context: Context, unit: Unit) -> None:
        """The backward of ``unit`` is next, the last one that needs something gathered: large buckets of units around
        it go now where nobody reads them any more.

        An embedding that is also the head is such: its backward reads no values, and needs memory for three tensors of
        that size (two gradients and their sum). Small buffers go to a pool, where nobody would take them now.
        """
        if self._drives or not self.accumulates:
            return
        for _, bucket in context.uses[: context.left]:
            # Another forward that waits would gather it again, and on each rank or on none.
            if not bucket.partitioned or bucket.leases > 1 or bucket.memory.pools(bucket.num_bytes):
                continue
            if bucket in self.read_last:
                continue
            if bucket not in unit.partitioned and bucket.parameters.live and not bucket.parameters.is_saved():
                self._unread.add(bucket)
                self._residency.rest(bucket, backward=False)

    def take_back(self, bucket: Bucket) -> bool:
        """Gather ``bucket`` if it was released early, but is read (by a hook, or to recompute); whether it was released
        so. Collective."""
        if bucket in self._unread:
            self._executor.wait(bucket)
        return bucket in self._unread

    def _finish(self, context: Context, first: int) -> None:
        """The calls from ``first`` on are done, and with them the buckets that they used first."""
        uses, drives, left = context.uses, self._drives, context.left
        ends = drives or self.accumulates
        while left and uses[left - 1][0] >= first:
            context.left = left = left - 1
            bucket = uses[left][1]
            others = False
            if ends:
                bucket.leases -= 1
                others = bucket.leases > 0
                if drives or not others:
                    self._done.add(bucket)
                    self._newly_done = True
            if bucket.partitioned:
                # Other forwards of the hooks wait for their own backward; in a window its policy knows what comes.
                self._residency.rest(bucket, backward=others and not drives)
                if ends and not others:
                    bucket.parameters.secondary = None

    def is_over(self, bucket: Bucket) -> bool:
        """Nothing will be added to the gradient of ``bucket`` in this backward, and nothing that it waits for."""
        if self._drives:  # leases of other contexts are the schedule's affair
            return bucket in self._done or (bucket not in self.used and self._is_ready(bucket))
        return not bucket.leases and (bucket in self._done or self._is_ready(bucket))

    def _is_ready(self, bucket: Bucket) -> bool:
        """Nothing will be added to the gradient of ``bucket``, which no unit that ran owns.

        At stage 3 it was not whole, unless it is resident; elsewhere the engine knows whether it was used.
        """
        return bucket.partitioned if self._partitioned else bucket not in self.awaited

    @property
    def place(self) -> tuple[Context, str] | None:
        """The context that it is in, and the unit of the call that it is at."""
        context = self.at
        if context is None:
            return None
        return context, context.calls[context.cursor].name if context.cursor < len(context.calls) else ""


# Reductions ----------------------------------------------------------------------------------------------------------


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
        reduce_dtype: see there.
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
        self.reduce_dtype, self._num_in_flight = reduce_dtype, num_in_flight

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
            self._executor.reduce(gradients.bucket, self.reduce_dtype)()
            if self.follower is not None:
                self.follower.reduced(gradients.bucket)
            return
        while len(self._in_flight) >= self._num_in_flight:
            self._land()
        for older, _ in self._in_flight:
            older.advance()
        self._in_flight.append((gradients, self._executor.reduce(gradients.bucket, self.reduce_dtype)))
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
                seen: Callable[[Any], None] = own_hook(partial(self.saw, bucket, slot))
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
