"""The plan of a forward and its backward: what will be gathered and released, from recorded unit calls and a policy.

It is the runtime's own code (``residency.py``, ``walk.py``) on an executor that moves nothing and writes down what is
asked of it. So there is one policy, and a plan is what a recording will be.

The plan is that of a training pass that is predicted right: prefetching knows its order, and no unit is recomputed in
backward. That of a window (``window.py``) comes from a schedule's list of :class:`Drive`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from zoo.plan import Action, Actions, Kind, Moment
from zoo.shard.buckets import Bucket
from zoo.shard.parameters import Presence
from zoo.shard.runtime.contexts import BackwardPart, Context, Contexts
from zoo.shard.runtime.executor import Executor
from zoo.shard.runtime.residency import Residency, ResidencyPolicy, WindowBudget
from zoo.shard.runtime.walk import Walk, launches_nothing

if TYPE_CHECKING:
    from zoo.shard.runtime.hooks import Runtime


@dataclass(frozen=True, slots=True)
class Enter:
    """A unit's forward starts, which uses these partitioned buckets."""

    name: str
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """The latest one that has not ended ends; ``called``: backward will come back through its output."""

    called: bool = True


Call = Enter | Exit


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One forward and its backward, or those of a window.

    Attributes:
        actions: unshards, prefetches and reshards, in order.
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
    """Calls of all units that have partitioned buckets, or of those within ``modules``, one after the other."""
    within = tuple(f"{name}." for name in modules)
    return [
        event for unit in units
        if unit.partitioned and (not modules or f"{unit.name}.".startswith(within))
        for event in (Enter(unit.name, unit.partitioned), Exit())
    ]  # fmt: skip


def calls_of(events: Iterable[Any]) -> list[Call]:
    """What the hooks have noted of a pass: units that start, and for each that ends, whether backward comes back."""
    return [Exit(event) if isinstance(event, bool) else Enter(event.name, event.partitioned) for event in events]


def plan_of(runtime: Runtime, drives: Sequence[Drive] | None = None, max_bytes: int | None = None) -> Plan:
    """What a training forward like the latest one and its backward do; before the first: all units in turn.

    ``drives``: of a window instead, which takes at most ``max_bytes``.
    """
    policy = runtime.residency.policy
    if drives is None:
        seen = runtime.latest_calls
        return plan_pass(calls_of(seen) if seen else units_in_turn(runtime.units), policy)
    calls = {}
    for drive in drives:
        if drive.verb == "forward" and drive.like not in calls:
            latest = runtime.window_calls.get(drive.like)
            calls[drive.like] = units_in_turn(runtime.units, drive.modules) if latest is None else calls_of(latest)
    return plan_window(drives, calls, policy, max_bytes)


def plan_pass(calls: Sequence[Call], policy: ResidencyPolicy) -> Plan:
    """What happens to partitioned buckets in a forward of these calls and its backward.

    Args:
        calls: enters and exits as they come; they nest as the modules do.
        policy: what is gathered ahead, and what stays gathered.
    """
    return _Planner(calls, policy).run(calls)


def plan_window(
    drives: Sequence[Drive], calls: Mapping[Hashable, Sequence[Call]], policy: ResidencyPolicy, window_bytes: int | None
) -> Plan:
    """What happens to partitioned buckets in a window with these drives, after one that was like it.

    Args:
        calls: by ``like``: what a forward enters and exits.
        policy: see :func:`plan_pass`. window_bytes: of the window, where it has a budget.
    """
    planner = _Planner([event for part in calls.values() for event in part], policy)
    if window_bytes is not None:
        planner.residency.use(WindowBudget(window_bytes, policy))
    planner.window(drives, calls)  # prefetching knows its orders from this
    return planner.window(drives, calls)


def _reductions(drives: Sequence[Drive]) -> int:
    """Those that are asked for, and that of the step where something was accumulated after them."""
    accumulating = [drive for drive in drives if drive.verb in ("backward", "backward_weights")]
    return sum(drive.reduce for drive in accumulating) + (not accumulating or not accumulating[-1].reduce)


class _Planner:
    """Goes through passes as the hooks do, with buckets and an executor that are none.

    Attributes:
        residency: of those.
    """

    def __init__(self, calls: Sequence[Call], policy: ResidencyPolicy) -> None:
        buckets = dict.fromkeys(b for event in calls if isinstance(event, Enter) for b in event.buckets)
        self._planned: dict[Bucket, Any] = {bucket: _PlannedBucket(bucket) for bucket in buckets}
        self._executor = _NullExecutor()
        self.residency = Residency(list(self._planned.values()), self._executor, policy)

    def run(self, calls: Sequence[Call]) -> Plan:
        """One forward and its backward."""
        residency, mode = self.residency, "training"
        residency.orders.begin(mode)
        for event in calls:  # prefetching knows the order from an earlier pass
            for bucket in event.buckets if isinstance(event, Enter) else ():
                residency.orders.advance(self._planned[bucket])
        residency.orders.end()
        context, walk = self._forward(calls, mode, Context(0, 0)), self._walk(Contexts())
        self._executor.now = (Moment.BACKWARD, "")
        walk.begin(accumulates=True, launches=False)
        walk.go_to(context)
        walk.leave()
        residency.settle(driven=False)
        return self._executor.plan()

    def window(self, drives: Sequence[Drive], calls: Mapping[Hashable, Sequence[Call]]) -> Plan:
        """All that a schedule does, from the beginning of the window to its end."""
        self._executor.restart()
        contexts = Contexts()
        walk = self._walk(contexts)
        running: dict[Hashable, Context] = {}
        for drive in drives:
            if drive.verb == "forward":
                running[drive.key] = self._forward(calls[drive.like], "training", contexts.drive(f"{drive.key}"))
                continue
            self._executor.now = (Moment.BACKWARD, "")
            part = BackwardPart(drive.verb)
            walk.drive(running[drive.key], part, launches=False)
            walk.arrive()
            self.residency.settle(driven=True)
            if part is not BackwardPart.INPUTS:
                contexts.close(running.pop(drive.key))
        self.residency.clear()
        return self._executor.plan(reductions=_reductions(drives))

    def _walk(self, contexts: Contexts) -> Walk:
        return Walk(contexts, self.residency, self._executor, partitioned=True, launch=launches_nothing)

    def _forward(self, calls: Sequence[Call], mode: str, context: Context) -> Context:
        residency, executor = self.residency, self._executor
        running: list[Any] = []
        residency.orders.begin(mode)
        for event in calls:
            if isinstance(event, Enter):
                buckets = tuple(self._planned[b] for b in event.buckets)
                unit: Any = SimpleNamespace(name=event.name, partitioned=buckets, gradients=())
                running.append(unit)
                executor.now = (Moment.FORWARD, unit.name)
                context.use(unit.partitioned)
                residency.enter(unit.partitioned)
                continue
            unit = running[-1]
            if event.called:
                context.calls.append(unit)
            residency.exit(unit.partitioned, backward=True)
            running.pop()
            executor.now = (Moment.FORWARD, running[-1].name if running else "")
        residency.end()
        return context


class _PlannedBucket:
    """What residency and walks keep of a bucket, and of its parameters."""

    partitioned, gradients = True, None

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.index, self.spec, self.num_bytes, self.memory = bucket.index, bucket.spec, bucket.num_bytes, bucket.memory
        self.mean_bytes = bucket.mean_bytes
        self.leases, self.active, self.context_serial = 0, 0, -1
        self.parameters = self
        self.presence = Presence.SHARDED
        self.secondary: bool | None = None

    @property
    def live(self) -> bool:
        """As of a bucket's parameters."""
        return self.presence is not Presence.SHARDED

    def is_saved(self) -> bool:
        """As of a bucket's parameters: as it was in the latest backward."""
        return self.bucket.parameters.saved


class _NullExecutor(Executor):
    """Moves nothing: what is gathered is here at once, and everything is written down.

    Attributes:
        now: when it is, and which unit runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = (Moment.FORWARD, "")
        self.restart()

    def restart(self) -> None:
        """Nothing has been written down yet."""
        self._actions = Actions()
        self._gathers: list[tuple[Bucket, bool]] = []
        self._secondary: set[Bucket] = set()

    def plan(self, *, reductions: int = 1) -> Plan:
        """What has been."""
        return Plan(
            actions=self._actions, gathers=tuple(self._gathers), secondary=frozenset(self._secondary),
            reductions=reductions,
        )  # fmt: skip

    def unshard(self, bucket: Any, *, exact: bool = False, ahead: bool = False) -> None:
        """See :class:`Executor`."""
        if bucket.presence is Presence.SHARDED:
            bucket.presence = Presence.HIDDEN
            self._gathers.append((bucket.bucket, bucket.secondary is not None))
            self._note(Kind.PREFETCH if ahead else Kind.UNSHARD, bucket.bucket)

    def wait(self, bucket: Any, *, exact: bool = False) -> None:
        """See :class:`Executor`."""
        self.unshard(bucket)

    def hide(self, bucket: Any) -> None:
        """Nobody sees it anyway."""

    def reshard(self, bucket: Any, *, again: bool = False) -> None:
        """See :class:`Executor`."""
        if bucket.presence is not Presence.SHARDED:
            bucket.presence = Presence.SHARDED
            self._note(Kind.RESHARD, bucket.bucket)
            if again and bucket.bucket.secondary_bytes():
                bucket.secondary = True
                self._secondary.add(bucket.bucket)

    def _note(self, kind: Kind, bucket: Bucket) -> None:
        moment, unit = self.now
        self._actions.append(
            Action(
                kind=kind, bucket=bucket.index, label=bucket.label, num_bytes=bucket.num_bytes, moment=moment, unit=unit
            )
        )
