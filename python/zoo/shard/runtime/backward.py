"""Backward: what the hooks on the units' outputs do.

The one hook on a unit's output runs right before the unit's own backward. The autograd engine runs nodes in the reverse
order of their creation, so at that moment everything recorded later is finished; the context is walked back to this
call (``walk.py``), which gathers what this and the skipped units need, releases and reduces what is finished, in an
order that depends on the context alone. So every rank issues the same collectives in the same order even when a part of
the model gets a gradient on some ranks only. What no hook reached is walked at the end of backward.

Where several contexts are open, one rank's loss may lead to others than another rank's. Whether a rank's graph reaches
a context is known only when it is there, so wherever a rank would go from one context to the next, and at the end, all
ranks vote: the latest context that anybody wants is next, and all ranks walk it (:meth:`Backward._follow`). With one
open context, or nothing partitioned, there is nothing to vote on.

A backward belongs to a *kind* that is part of the call: one that accumulates into parameters ends in a reduction, with
zeros where nothing arrived; one for other tensors (``autograd.grad``, ``backward(inputs=)``) gathers, and leaves
everything else as it was.

A schedule (``window.py``) says all that itself: between :meth:`Backward.drive` and :meth:`Backward.arrive` there is one
context, nothing to vote on, and its :class:`BackwardPart` and not the graph says what is accumulated. The hooks only
walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from zoo.comm import Communicator, Recovery
from zoo.parts.hooks import own_hook
from zoo.shard.buckets import Bucket
from zoo.shard.gradients import GradientPhase
from zoo.shard.runtime.contexts import FAILED, BackwardPart, Context, Contexts, Phase, Unit
from zoo.shard.runtime.executor import Executor
from zoo.shard.runtime.graph_tasks import GraphTasks, follow, multiplied, note_multiplied
from zoo.shard.runtime.residency import Residency
from zoo.shard.runtime.walk import Reductions, Walk

_ACCUMULATING = GradientPhase.ACCUMULATING
_graph_task = torch._C._current_graph_task_id
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False)


class UnscaledLossError(ValueError, RuntimeError):
    """A backward of a loss that the loss scale has not multiplied. It is raised where autograd runs, whose own errors
    are RuntimeErrors."""


class Backward:
    """Walks contexts back while autograd runs.

    Args:
        comm: all ranks, which vote.
        recovery: is told of backwards that fail where other ranks wait for this one.
        overlap: reduce buckets during backward; otherwise all at its end.
        divergent: every rank goes its own way: nothing is skipped for the sake of others, and nothing reduced here.
        on_end: called when a backward that accumulates into parameters has ended, with whether it reduces.
    """

    def __init__(
        self, contexts: Contexts, residency: Residency, reductions: Reductions, buckets: Sequence[Bucket], *,
        executor: Executor, comm: Communicator, overlap: bool, on_end: Callable[[bool], None],
        recovery: Recovery | None = None, divergent: bool = False,
    ) -> None:  # fmt: skip
        self._contexts, self._residency, self._reductions = contexts, residency, reductions
        self._buckets, self.comm, self.overlap, self._on_end = buckets, comm, overlap, on_end
        self._executor, self.recovery = executor, recovery
        self._partitioned = any(b.partitioned for b in buckets)
        self.walk = Walk(
            contexts, residency, executor, partitioned=self._partitioned, launch=reductions.launch_ready,
            divergent=divergent,
        )  # fmt: skip
        self._whole = [b for b in reversed(buckets) if b.gradients is not None and not b.partitioned]
        self._tasks = GraphTasks(buckets)
        self._divergent = divergent
        self.sync = not divergent
        """Of backwards that begin now: they end in a reduction."""
        self.scale = 1.0
        """What a loss has to be multiplied by before backward."""
        self.scaled: Callable[[], Any] = _nothing
        """Returns something as long as a backward of a loss that was multiplied runs."""
        self.arriving: Callable[[], tuple[float, bool]] | None = None
        """Asked when a backward begins that adds to gradients: what these are multiplied by where they arrive, and
        whether it may end in a reduction."""
        self._factor = 1.0
        self.failed = False
        self.running = False
        self._alive: Callable[[], Any] = _nothing
        self._syncs = self._accumulates = self._votes = self._retains = False
        self._driven: Context | None = None
        self._part = BackwardPart.WHOLE
        self.num_begun = 0
        self.refused = 0
        """Backwards of losses without a graph since gradients were dropped; the other ranks went through theirs."""
        self.with_graph = 0
        """Since then, those that led to something of the model."""
        self.arrivals: list[Any] = []
        """Hooks on parameters, of a model whose gradients were differentiated."""
        self._graph_kept_in = -1
        self._task_over = True

    # Beginning -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Something of a backward happens: if it is the first of one, begin."""
        try:
            self._begin()
        except BaseException as error:
            self._tell(error)
            raise

    def _begin(self) -> None:
        if self.running:
            if self._alive() is not None:
                return  # perhaps a backward within the backward (re-entrant checkpointing)
            if self._driven is not None:
                self._begin_task(self._driven)
                return
            self.fail()
        if self.failed:
            raise RuntimeError(FAILED)
        if self.recovery is not None:
            self.recovery.settle()  # a forward has failed since this one
        alive = self._tasks.follow(self._end)
        self._accumulates = self._tasks.accumulates()
        self._syncs = self.sync and self._accumulates
        if self._accumulates:
            self._receive()
        several = len(self._contexts.open) > 1
        self._votes = several and self._partitioned and self.comm.size > 1 and not self._divergent
        launches = self.overlap and self._syncs and self._graph_kept_in != self._contexts.updates
        self.walk.begin(accumulates=self._accumulates, launches=launches)
        self._retains = _keeps_graph()
        if self._syncs:
            self._reductions.begin()
        if self._accumulates:
            self._open_others()
        self._alive = alive
        self.running = True
        self.num_begun += 1
        self.with_graph += self._accumulates

    @property
    def has_nothing(self) -> bool:
        """All that went backward on this rank since gradients were dropped was refused."""
        return self.refused > 0 and not self.with_graph

    def knows_what_others_do(self) -> bool:
        """Whether this rank can go through a backward of other ranks (:mod:`~zoo.shard.runtime.without_graph`)."""
        return not self._divergent and self._driven is None and (bool(self._contexts.open) or not self._partitioned)

    def begin_without_graph(self) -> None:
        """In a graph task that leads to nothing of the model: a backward begins, which goes where others' may."""
        self.begin()
        self.with_graph -= self._accumulates
        if len(self._contexts.open) == 1 and self.walk.at is None:
            self._reach(self._contexts.open[0])

    def _receive(self) -> None:
        """What the gradients of this backward are multiplied by where they arrive: settled before the first does."""
        factor, syncs = (1.0, True) if self.arriving is None else self.arriving()
        if self.scaled() is None:
            scale = multiplied("loss scale")
            if scale != 1.0:  # the loss is another optimizer's too, which has multiplied it
                factor *= self.scale / scale
            elif self.scale != 1.0:
                raise UnscaledLossError(
                    f"Loss scaling is required: loss_scale={self.scale}, and backward was called on a loss without it: "
                    "its gradients would be divided by the scale. Call optimizer.backward(loss), or "
                    "optimizer.scale_loss(loss).backward()."
                )
        self._syncs = self._syncs and syncs
        if self.arriving is not None or factor != 1.0 or self._factor != 1.0:
            self._arrive_with(factor)

    def _arrive_with(self, factor: float) -> None:
        self._factor = factor
        for bucket in self._buckets:
            if bucket.gradients is not None:
                bucket.gradients.arrive_with(factor)

    def _rest(self) -> None:
        if self.arriving is not None or self._factor != 1.0:
            for bucket in self._buckets:
                if bucket.gradients is not None:
                    bucket.gradients.rest()

    def _open_others(self) -> None:
        """Gradients come for parameters whose module did not run: another module used them."""
        contexts = self._contexts.open if self._driven is None else [self._driven]
        ran = {unit.key for context in contexts for unit in context.calls}
        for bucket in self._whole:
            counted = bucket in self.walk.used if self._driven is not None else bucket.leases
            # Of a bucket of several modules, those that ran open it only when backward comes to them.
            idle = set(bucket.spec.units) - ran if counted else ()
            if (idle and self._tasks.adds_to_units(bucket, idle)) if counted else self._tasks.adds_to(bucket):
                self.walk.awaited.add(bucket)
                if bucket.gradients is not None:
                    bucket.gradients.expect()

    # Driven ----------------------------------------------------------------------------------------------------------

    def drive(self, context: Context, part: BackwardPart, *, syncs: bool) -> None:
        """A backward begins that goes through ``context`` and nothing else, until :meth:`arrive` or :meth:`abandon`.

        Args:
            part: what it computes. After the gradients of the inputs the context has no leases any more.
            syncs: at its end gradients are reduced, with all that was accumulated before.
        """
        if syncs:
            self._reductions.begin()
        if self._factor != 1.0:
            self._arrive_with(1.0)
        self._driven, self._part = context, part
        self._accumulates, self._syncs, self._votes = part is not BackwardPart.INPUTS, syncs, False
        self._task_over = True
        launches = self.overlap and syncs and self._graph_kept_in != self._contexts.updates
        self.walk.drive(context, part, launches=launches)
        self.running = True
        self._alive = _always if part is BackwardPart.WEIGHTS else _nothing
        for bucket in sorted(self.walk.used, key=_index) if part is BackwardPart.WEIGHTS else ():
            if bucket.gradients is not None:
                bucket.gradients.expect()

    def _begin_task(self, context: Context) -> None:
        """A graph task of a driven backward reaches the model."""
        self._check_task()
        alive = self._tasks.follow(self._end_task)
        if self._part is BackwardPart.INPUTS and self._tasks.adds():
            raise RuntimeError(
                "backward() inside of backward_inputs(): it would add to the gradients of parameters too. Compute the "
                "gradients of the inputs with torch.autograd.grad(outputs, inputs, ...)."
            )
        if context.cursor < len(context.calls):  # a further one of the same backward: from the end again
            self.walk.again()
        self._alive, self._task_over = alive, False
        if self._accumulates and self._tasks.adds():
            self._open_others()

    def _end_task(self) -> None:
        self._task_over = True

    def _check_task(self) -> None:
        if not self._task_over:
            raise RuntimeError("an autograd call inside of this backward ended with an exception, which was caught.")

    def arrive(self) -> None:
        """The driven backward is over. Collective if it reduces, or if this rank's graph did not get everywhere."""
        self._check_task()
        self.failed = self._accumulates  # unless this gets to its end
        self.walk.arrive()
        self._stop_driving()
        self._residency.settle(driven=True)
        if self._accumulates:
            self._on_end(self._syncs)
        self.failed = False

    def abandon(self) -> None:
        """The driven backward is left with an exception."""
        if self._driven is not None:
            self._stop_driving()
            self.fail()

    def _stop_driving(self) -> None:
        self._driven = self.walk.at = None
        self.running, self._alive = False, _nothing

    @property
    def driven(self) -> str:
        """What is driven, for messages; empty if nothing is."""
        return f"{self._part.value} of {self._driven.owner}" if self._driven is not None else ""

    def _refuse_context(self, context: Context) -> None:
        """Raise unless a backward that is no driven one came to a context that nobody drives."""
        if self._driven is not None:
            other = context.owner or "a forward outside of the window"
            raise RuntimeError(
                f"{self.driven} has reached {other}: its loss leads to both. Detach what goes from one forward to "
                "another, and bring each back by itself."
            )
        if context.owner:
            ended = " It has ended." if context.phase is Phase.EXPIRED else ""
            raise RuntimeError(
                f"a backward has reached {context.owner}, which a schedule drives: run it inside of `with "
                f"window.backward(key):`.{ended}"
            )

    # Walking ---------------------------------------------------------------------------------------------------------

    def on_output_grad(self, context: Context, index: int, grads: Any) -> None:
        """The gradient of the output of call ``index`` is there; its backward is next."""
        try:
            if context is not self.walk.at or self._alive() is None:
                if torch.is_grad_enabled():
                    self._keep_graph(context)
                    return
                if context is not self._driven and (context.owner or self._driven is not None):
                    self._refuse_context(context)
                self.begin()
                if context is not self.walk.at and not self._reach(context):
                    self.walk.open(context.calls[index])
                    return
            if index < context.cursor:
                self.walk.to(context, index)
        except BaseException as error:
            self._tell(error)
            raise

    def _keep_graph(self, context: Context) -> None:
        """Gradients are made with a graph of their own (``create_graph=True``): torch does it with whole parameters.

        What comes back through that graph reaches parameters past the outputs of their units, before or after these:
        from now on it is noticed where it arrives, and until the next step reductions wait for the end of a backward.

        Raises:
            NotImplementedError: gradients of parameters are added up, or parameters are partitioned, or driven.
        """
        if self._tasks.accumulates():
            raise NotImplementedError(
                "backward(create_graph=True) through a model under a ZeRO optimizer: gradients accumulate in flat "
                "buffers, which a second derivative cannot pass through. At stages 0 to 2 make what is to be "
                "differentiated again by torch.autograd.grad(outputs, inputs, create_graph=True), and call backward() "
                "of the loss that comes of it."
            )
        if self._partitioned or self._driven is not None or context.owner:
            why = "inside of a window" if self._driven is not None or context.owner else "at ZeRO stage 3"
            raise NotImplementedError(
                f"autograd.grad(create_graph=True) through a model {why}: the second derivative would use parameters "
                "that are not there any more. Stages 0 to 2, where parameters are whole, compute it."
            )
        self._graph_kept_in, self.walk.launches = self._contexts.updates, False
        if not self.arrivals:
            for bucket in self._buckets:
                for parameter in bucket.spec.parameters if bucket.gradients is not None else ():
                    hook = parameter.register_hook(own_hook(partial(self._on_arrival, bucket)))  # type: ignore[no-untyped-call]
                    self.arrivals.append(hook)

    def _on_arrival(self, bucket: Bucket, gradient: torch.Tensor) -> None:
        """A gradient of a parameter of ``bucket`` is there, which is added to the flat one next, or returned."""
        if torch.is_grad_enabled() or self._driven is not None:
            return
        self.begin()
        if self._accumulates and bucket.gradients is not None and bucket.gradients.phase is not _ACCUMULATING:
            bucket.gradients.open()

    def _tell(self, error: BaseException, *, inside: bool = True) -> None:
        """A backward fails on this rank: other ranks may be in its collectives."""
        if self.recovery is not None:
            asks = inside and not self.running  # it was refused before it was known what it is
            if self._partitioned or (self.sync and self._tasks.accumulates() if asks else self._syncs):
                self.recovery.failed(error)

    def on_late(self, unit: Unit, grads: Any) -> None:
        """A unit that was run inside backward (re-entrant checkpointing) gets its own, nested backward."""
        self.begin()
        self.walk.open(unit)

    def _reach(self, context: Context) -> bool:
        """Go to ``context``, which this rank's graph leads to; False if this backward is through with it."""
        if context.updates != self._contexts.updates:
            raise RuntimeError(
                "backward through a forward that is older than the latest step, or than new values that were given to "
                "parameters. Run the forward again."
            )
        if context.phase is Phase.WALKED:
            return False
        if context.phase is Phase.EXPIRED:
            self._contexts.reopen(context)
        self.walk.leave()
        if self._votes:
            self._follow(context.serial)
        self.walk.go_to(context)
        return True

    def _follow(self, wanted: int) -> None:
        """Vote, and walk what others want, until what this rank wants (-1: nothing more) is next. Collective."""
        while True:
            chosen = self._executor.vote(self.comm, wanted, self._buckets[0].device)
            if chosen == wanted:
                return
            context = self._contexts.find(chosen)
            if context is None or context.phase is Phase.WALKED:
                raise RuntimeError(
                    f"rank {self.comm.rank}: another rank goes back through forward number {chosen}, whose record "
                    "this rank has no more. Bring the outputs of a forward back on all ranks, or on none."
                )
            if context.phase is Phase.EXPIRED:
                self._contexts.reopen(context)
            self.walk.go_to(context)
            self.walk.leave()

    # Ending ----------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        try:
            self._finish_all()
        except BaseException as error:
            self._tell(error, inside=False)
            raise

    def _finish_all(self) -> None:
        self.failed = True  # unless this gets to its end
        self.walk.leave()
        if self._votes:
            self._follow(-1)
        self._alive = _nothing
        self.running = False
        if self._accumulates:
            self._contexts.expire(self.walk.visited)
            if self._retains:  # another backward may come, together with that of other forwards
                for context in self.walk.visited:
                    self._contexts.reopen(context)
            self._on_end(self._syncs)
            self._rest()
        else:
            for context in self.walk.visited:
                context.rewind()
                context.phase = Phase.OPEN
        self.walk.visited.clear()
        if self._partitioned:
            self._residency.settle(driven=False)
        self.failed = False

    def returns_gradients(self) -> bool:
        """The call of autograd that runs returns gradients of parameters."""
        return self._tasks.adds() is None

    def left_alone(self) -> frozenset[tuple[int, int]]:
        """Bucket and slot of parameters to whose gradients the call of autograd that runs does not add, wherever it
        comes by: ``backward(inputs=)`` has named others."""
        return self._tasks.left_alone() if self._accumulates else frozenset()

    @property
    def under_way(self) -> bool:
        """A backward of this model runs, on whatever level of nesting."""
        return self.running and (self._driven is not None or self._alive() is not None)

    def check_running(self) -> None:
        """Called outside of backward: find out that the latest one died."""
        if self.running and self._driven is None and self._alive() is None:
            self.fail()

    def note_scaled(self) -> None:
        """The backward that runs is that of a loss that was multiplied by the scale."""
        self.scaled = follow()
        note_multiplied("loss scale", self.scale, self.scaled)

    def fail(self) -> None:
        """The backward ended with an exception: what it began is waited for, and nothing of it goes on."""
        self._tell(RuntimeError("a backward ended with an exception"), inside=False)
        self.running, self.failed = False, self._accumulates
        self._alive = _nothing
        self.walk.at = None
        if not self._accumulates:
            for context in self.walk.visited:
                context.rewind()
        self.walk.visited.clear()
        self._contexts.expire()
        try:
            self._reductions.abandon()
        finally:
            self._residency.clear()


def _nothing() -> None:
    return None


def _always() -> bool:
    return True


def _index(bucket: Bucket) -> int:
    return bucket.index
