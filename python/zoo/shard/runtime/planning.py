"""What a forward and its backward, or a step, will do: the list of actions, from recorded unit calls and a policy.

It is the runtime's own code (``residency.py``, ``walk.py``, ``executor.py``, ``recording.py``) on buckets that are none
(``stand_ins.py``). So there is one policy, and a plan is what a recording will be, action by action.

The plan is that of training passes that are predicted right: prefetching knows their order, no unit is recomputed in
backward, each forward's backward comes before the next forward, and gradients travel whole. That of a window
(``window.py``) comes from a schedule's list of :class:`Drive`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from zoo.plan import Actions, Kind
from zoo.shard.buckets import Bucket
from zoo.shard.runtime.contexts import BackwardPart, Context, Contexts
from zoo.shard.runtime.executor import Executor
from zoo.shard.runtime.recording import Recorder, Where
from zoo.shard.runtime.residency import Residency, WindowBudget
from zoo.shard.runtime.stand_ins import Moves, StandIn, StandInUnit
from zoo.shard.runtime.walk import Reductions, Walk

if TYPE_CHECKING:
    from zoo.shard.runtime.hooks import Runtime


@dataclass(frozen=True, slots=True)
class Enter:
    """A unit's forward starts, which uses these buckets."""

    name: str
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """The latest one that has not ended ends; ``called``: backward will come back through its output."""

    called: bool = True


Call = Enter | Exit


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One forward and its backward, those of a window, or a step.

    Attributes:
        actions: what a recording will have, in order.
        gathers: the buckets that are gathered, and whether from what hpZ keeps of them.
        secondary: the buckets of which hpZ keeps a part for backward.
        reductions: how often gradients are reduced.
    """

    actions: Actions
    gathers: tuple[tuple[Bucket, bool], ...]
    secondary: frozenset[Bucket]
    reductions: int = 1

    def times(self, passes: int, reductions: int) -> Plan:
        """So many of them, one after the other."""
        return replace(
            self, actions=Actions(list(self.actions) * passes), gathers=self.gathers * passes, reductions=reductions
        )


Verb = Literal["forward", "backward", "backward_inputs", "backward_weights"]


@dataclass(frozen=True, kw_only=True)
class Drive:
    """What a schedule does to one micro-batch: a verb of :class:`~zoo.shard.runtime.window.Window`, and its ``key``.

    Attributes:
        like: of a forward: it calls the units that the one of this key called in the latest window, if there was one.
        modules: otherwise in turn those that have one of these names, or are within them; () for all.
        reduce: of a backward.
    """

    verb: Verb
    key: Hashable
    like: Hashable = None
    modules: tuple[str, ...] = ()
    reduce: bool = False


def units_in_turn(units: Iterable[Any], modules: Sequence[str] = ()) -> list[Call]:
    """Calls of all units that have buckets to gather or to reduce, or of those within ``modules``, in turn."""
    within = tuple(f"{name}." for name in modules)
    return [
        event for unit in units
        if unit.recorded and (not modules or f"{unit.name}.".startswith(within))
        for event in (Enter(unit.name, unit.recorded), Exit())
    ]  # fmt: skip


def calls_of(events: Iterable[Any]) -> list[Call]:
    """What the hooks have noted of a pass: units that start, and for each that ends, whether backward comes back."""
    return [Exit(event) if isinstance(event, bool) else Enter(event.name, event.recorded) for event in events]


def plan_of(runtime: Runtime, drives: Sequence[Drive] | None = None, max_bytes: int | None = None) -> Plan:
    """What a training forward like the latest one and its backward do; before the first: all units in turn.

    ``drives``: of a window instead, which takes at most ``max_bytes``.
    """
    planner = _Planner(runtime)
    if drives is None:
        planner.passes([True])
        return planner.plan()
    planner.window(drives, max_bytes)
    return planner.plan(reductions=_reductions(drives))


def plan_step(
    runtime: Runtime, drives: Sequence[Drive] | None = None, max_bytes: int | None = None, *,
    reduces: Sequence[bool] = (True,), like: Actions | None = None,
) -> Plan:  # fmt: skip
    """What the next step does, from its first forward to the end of its update.

    Args:
        drives, max_bytes: see :func:`plan_of`. reduces: outside of a window, for each micro-batch whether its backward
            reduces gradients. like: a recording of an earlier step that has computations: the plan has them too.

    Raises:
        ValueError: ``like`` is the recording of something else.
    """
    planner = _Planner(runtime, like)
    if drives is None:
        planner.passes(reduces)
    else:
        planner.window(drives, max_bytes)
    planner.update()
    planner.close()
    return planner.plan()


def _reductions(drives: Sequence[Drive]) -> int:
    """Those that are asked for, and that of the step where something was accumulated after them."""
    accumulating = [drive for drive in drives if drive.verb in ("backward", "backward_weights")]
    return sum(drive.reduce for drive in accumulating) + (not accumulating or not accumulating[-1].reduce)


class _Planner:
    """Goes through passes as the hooks do, with stand-ins for buckets; what is recorded of them is the plan."""

    def __init__(self, runtime: Runtime, like: Actions | None = None) -> None:
        self._runtime, self._moves, self._like = runtime, Moves(), like
        self._of: dict[Bucket, Any] = {bucket: StandIn(bucket, self._moves) for bucket in runtime.buckets}
        buckets: list[Any] = list(self._of.values())
        self._trainable = [bucket for bucket in buckets if bucket.gradients is not None]
        self._partitioned = any(bucket.partitioned for bucket in buckets)
        self._executor = Executor()
        self._residency = Residency(buckets, self._executor, runtime.residency.policy)
        self._reductions = Reductions(buckets, self._executor, reduce_dtype=runtime.reductions.reduce_dtype)
        if runtime.reductions.follower is not None:
            self._reductions.follower = _UpdatesInBackward(self._publish)
        self._contexts = Contexts(runtime.contexts.latest)
        self._walk = Walk(
            self._contexts, self._residency, self._executor, partitioned=self._partitioned,
            launch=self._reductions.launch_ready,
        )  # fmt: skip
        self._running: list[Any] = []
        self._restart(like)

    def _restart(self, like: Actions | None) -> None:
        """Nothing has happened, and nothing has been written down."""
        self._context: Context | None = None
        self._ends = self._unreduced = self._waiting = False
        recorder = Recorder(self._where) if like is None else Repeater(self._where, like)
        self._recorder, self._actions, self._executor.watchers = recorder, recorder.actions, (recorder,)
        self._moves.gathers.clear()
        self._moves.secondary.clear()

    def plan(self, *, reductions: int = 1) -> Plan:
        """What has been."""
        return Plan(
            actions=self._actions, gathers=tuple(self._moves.gathers), secondary=frozenset(self._moves.secondary),
            reductions=reductions,
        )  # fmt: skip

    def close(self) -> None:
        """The step is over."""
        self._recorder.moves()
        if isinstance(self._recorder, Repeater):
            self._recorder.check()

    def _where(self) -> tuple[str, str, str]:
        """See :meth:`Runtime.where`."""
        if (at := self._walk.place) is not None:
            return "backward", at[0].name, at[1] or "(model)"
        if self._running:
            context = self._context.name if self._context is not None else ""
            return "forward", context, self._running[-1].name or "(model)"
        return "backward" if self._ends else "outside", "", ""

    # What a script or a schedule does --------------------------------------------------------------------------------

    def passes(self, reduces: Sequence[bool]) -> None:
        """Forwards like the latest one, each with its backward."""
        seen = self._runtime.latest_calls
        calls = calls_of(seen) if seen else units_in_turn(self._runtime.units)
        orders = self._residency.orders
        orders.begin("training")
        for event in calls:  # prefetching knows the order from an earlier pass
            for bucket in event.buckets if isinstance(event, Enter) else ():
                if bucket.partitioned:
                    orders.advance(self._of[bucket])
        orders.end()
        for each in reduces:
            whole: Any = StandInUnit("", ())
            context = self._contexts.begin(whole)
            self._forward(calls, context)
            self._backward(context, reduces=each)

    def window(self, drives: Sequence[Drive], max_bytes: int | None) -> None:
        """All that a schedule does, from the beginning of a window to its end, after one that was like it."""
        runtime, calls = self._runtime, dict[Hashable, Sequence[Call]]()
        for drive in drives:
            if drive.verb == "forward" and drive.like not in calls:
                latest = runtime.window_calls.get(drive.like)
                turn = units_in_turn(runtime.units, drive.modules)
                calls[drive.like] = turn if latest is None else calls_of(latest)
        outside = self._residency.policy
        if max_bytes is not None:
            self._residency.use(WindowBudget(max_bytes, outside))
        for like in (None, self._like):  # prefetching knows its orders from the first time
            self._restart(like)
            self._driven(drives, calls)
            self._residency.clear()
        self._residency.use(outside)

    def update(self) -> None:
        """The step after them."""
        if self._unreduced:
            self._reductions.finish()
        if self._waiting:
            self._reductions.finish_tied()
        if self._reductions.follower is None:
            self._publish()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        self._executor.publish_all(self._trainable)()
        self._residency.clear()

    def _driven(self, drives: Sequence[Drive], calls: Mapping[Hashable, Sequence[Call]]) -> None:
        running: dict[Hashable, Context] = {}
        for drive in drives:
            if drive.verb == "forward":
                context = running[drive.key] = self._contexts.drive(f"micro-batch {drive.key!r}")
                self._forward(calls[drive.like], context)
                continue
            part, context = BackwardPart(drive.verb), running[drive.key]
            if drive.reduce:
                self._reductions.begin()
            self._walk.drive(context, part, launches=drive.reduce and self._runtime.backward.overlap)
            if part is BackwardPart.WEIGHTS:
                for bucket in sorted(self._walk.used, key=lambda bucket: bucket.index):
                    if bucket.gradients is not None:
                        bucket.gradients.expect()
            self._walk.arrive()
            self._walk.at = None
            accumulates = part is not BackwardPart.INPUTS
            self._end(accumulates=accumulates, reduces=drive.reduce, driven=True)
            if accumulates:
                self._contexts.close(running.pop(drive.key))

    def _backward(self, context: Context, *, reduces: bool) -> None:
        walk = self._walk
        walk.begin(accumulates=True, launches=reduces and self._runtime.backward.overlap)
        if reduces:
            self._reductions.begin()
        walk.go_to(context)
        walk.leave()
        self._contexts.expire(walk.visited)
        self._end(accumulates=True, reduces=reduces, driven=False)

    def _end(self, *, accumulates: bool, reduces: bool, driven: bool) -> None:
        """Of a backward; the hooks release first where a schedule drives, and last where nobody does."""
        self._ends = accumulates
        if driven:
            self._residency.settle(driven=True)
        if accumulates:
            self._unreduced, self._waiting = not reduces, self._reductions.waits
        if reduces:
            self._reductions.finish()
        if not driven and self._partitioned:
            self._residency.settle(driven=False)
        self._ends = False

    def _forward(self, calls: Sequence[Call], context: Context) -> None:
        residency, running, self._context = self._residency, self._running, context
        residency.orders.begin("training")
        for event in calls:
            if isinstance(event, Enter):
                unit: Any = StandInUnit(event.name, tuple(self._of[bucket] for bucket in event.buckets))
                running.append(unit)
                context.use(unit.recorded)
                self._executor.moved()
                if unit.partitioned:
                    residency.enter(unit.partitioned)
                continue
            unit = running[-1]
            if event.called:
                context.calls.append(unit)
            if unit.partitioned:
                residency.exit(unit.partitioned, backward=bool(self._trainable))
            running.pop()
            self._executor.moved()
        residency.end()


class Repeater(Recorder):
    """Writes down what is planned, with the computations of a recording of the same step at their places."""

    def __init__(self, where: Callable[[], Where], like: Actions) -> None:
        super().__init__(where, self._next)
        self._like, self._at = like, 0

    def _next(self, moment: str, unit: str) -> tuple[int, int]:
        if self._at < len(self._like):
            action = self._like[self._at]
            of_another = not action.context.startswith("pass ") and action.context != self._place[1]  # micro-batch
            here = (action.moment.value, action.unit) == (moment, unit) and not of_another
            if action.kind is Kind.COMPUTE and here:  # else nothing is computed here, such as a look into a table
                self._at += 1
                return action.flops, action.num_bytes
        return 0, 0

    def _note(self, kind: Kind, bucket: Bucket | None, **options: Any) -> None:
        super()._note(kind, bucket, **options)
        found, index = self._like[self._at : self._at + 1], bucket.index if bucket is not None else -1
        if not found or (found[0].kind, found[0].bucket) != (kind, index):
            raise ValueError(
                f"plan(like=...): the step goes on with {self.actions[-1]}, and the recording with "
                f"{found[0] if found else 'nothing'}: record a whole step that is like the next one."
            )
        self._at += 1

    def check(self) -> None:
        """Raise ValueError where something is left of the recording."""
        if self._at < len(self._like):
            raise ValueError(
                f"plan(like=...): the step is over, and the recording goes on with {self._like[self._at]}: record one "
                "step, from before its first forward to after its update."
            )


class _UpdatesInBackward:
    """Follows planned reductions where updates are made in backward: see :class:`~zoo.shard.runtime.walk.Follower`."""

    def __init__(self, publish: Callable[[], None]) -> None:
        self._publish = publish

    def reduced(self, bucket: Bucket) -> None:
        """An update of a bucket is no action."""

    def finish(self) -> None:
        """All of it is updated."""
        self._publish()

    def abandon(self) -> None:
        """Nothing fails."""
