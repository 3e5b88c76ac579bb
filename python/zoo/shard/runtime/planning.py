"""The plan of a forward and its backward: what will be gathered and released, from recorded unit calls and budgets.

It is the runtime's own code (``residency.py``, the walk of ``backward.py``) run on stand-ins of the buckets, which hold
no memory and write down what is asked of them. So there is one policy, and a plan is what a recording will be.

The plan is that of a training pass that is predicted right: prefetching knows its order, and no unit is recomputed in
backward. That of a window (``window.py``) comes from a schedule's list of :class:`Drive`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zoo.plan import Action, Actions, Kind, Moment
from zoo.shard.buckets import Bucket
from zoo.shard.parameters import Presence
from zoo.shard.runtime.backward import Backward
from zoo.shard.runtime.contexts import Context, Contexts, Part
from zoo.shard.runtime.residency import Residency


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


def in_turn(units: Iterable[tuple[str, tuple[Bucket, ...]]]) -> list[Call]:
    """Calls of units that do not nest, one after the other."""
    return [event for name, buckets in units for event in (Enter(name, buckets), Exit())]


def units_in_turn(units: Iterable[Any], modules: Sequence[str] = ()) -> list[Call]:
    """Calls of all units that have partitioned buckets, or of those within ``modules``."""
    within = tuple(f"{name}." for name in modules)
    return in_turn(
        (unit.name, unit.partitioned) for unit in units
        if unit.partitioned and (not modules or f"{unit.name}.".startswith(within))
    )  # fmt: skip


def calls_of(events: Iterable[Any]) -> list[Call]:
    """What the hooks have noted of a pass: units that start, and for each that ends, whether backward comes back."""
    return [Exit(event) if isinstance(event, bool) else Enter(event.name, event.partitioned) for event in events]


def plan_pass(calls: Sequence[Call], *, prefetch_bytes: int, keep_bytes: int) -> Plan:
    """What happens to partitioned buckets in a forward of these calls and its backward.

    Args:
        calls: enters and exits as they come; they nest as the modules do.
        prefetch_bytes, keep_bytes: see :class:`~zoo.shard.runtime.residency.Residency`.
    """
    buckets = list(dict.fromkeys(b for event in calls if isinstance(event, Enter) for b in event.buckets))
    return _Planner(buckets, prefetch_bytes, keep_bytes).run(calls)


def plan_window(
    drives: Sequence[Drive], calls: Mapping[Hashable, Sequence[Call]], *, prefetch_bytes: int, keep_bytes: int,
    window_bytes: int | None,
) -> Plan:  # fmt: skip
    """What happens to partitioned buckets in a window with these drives, after one that was like it.

    Args:
        calls: by ``like``: what a forward enters and exits.
        prefetch_bytes, keep_bytes, window_bytes: see :class:`~zoo.shard.runtime.residency.Residency`.
    """
    every = [event for part in calls.values() for event in part if isinstance(event, Enter)]
    planner = _Planner(list(dict.fromkeys(b for event in every for b in event.buckets)), prefetch_bytes, keep_bytes)
    planner.window(drives, calls, window_bytes)  # prefetching knows its orders from this
    planner.restart()
    return planner.window(drives, calls, window_bytes)


def _reductions(drives: Sequence[Drive]) -> int:
    """Those that are asked for, and that of the step where something was accumulated after them."""
    accumulating = [drive for drive in drives if drive.verb in ("backward", "backward_weights")]
    return sum(drive.reduce for drive in accumulating) + (not accumulating or not accumulating[-1].reduce)


class _Planner:
    def __init__(self, buckets: Sequence[Bucket], prefetch_bytes: int, keep_bytes: int) -> None:
        self.actions = Actions()
        self.gathers: list[tuple[Bucket, bool]] = []
        self.secondary: set[Bucket] = set()
        self.now = (Moment.FORWARD, "")
        self.ahead = False
        size = max((b.index for b in buckets), default=-1) + 1
        self._stand_ins: list[Any] = [None] * size
        for bucket in buckets:
            self._stand_ins[bucket.index] = _StandIn(self, bucket)
        # They are found by the index of their bucket; no bucket that is not used is asked for.
        self._used = [s for s in self._stand_ins if s is not None]
        self._residency = _Planned(self, self._stand_ins, self._used, prefetch_bytes, keep_bytes)

    def run(self, calls: Sequence[Call]) -> Plan:
        residency, mode = self._residency, "training"
        residency.begin(mode)
        for event in calls:  # prefetching knows the order from an earlier pass
            for bucket in event.buckets if isinstance(event, Enter) else ():
                residency.orders.advance(bucket.index)
        residency.orders.end()
        context = self._forward(calls, mode, Context(0, 0))
        self._walker().walk_through(context)
        self._residency.clear()
        return self._plan()

    def window(self, drives: Sequence[Drive], calls: Mapping[Hashable, Sequence[Call]], num_bytes: int | None) -> Plan:
        """All that a schedule does, from the beginning of the window to its end."""
        self._residency.window_bytes = num_bytes
        contexts, walker = Contexts(), self._walker()
        running: dict[Hashable, Context] = {}
        for drive in drives:
            if drive.verb == "forward":
                running[drive.key] = self._forward(calls[drive.like], "training", contexts.drive(f"{drive.key}"))
                continue
            self.now = (Moment.BACKWARD, "")
            part = Part(drive.verb)
            walker.drive_through(running[drive.key], part)
            if part is not Part.INPUTS:
                contexts.close(running.pop(drive.key))
        self._residency.clear()
        return self._plan(reductions=_reductions(drives))

    def restart(self) -> None:
        """What was planned is forgotten, but not the orders."""
        self.actions, self.gathers, self.secondary = Actions(), [], set()

    def _plan(self, **more: int) -> Plan:
        return Plan(
            actions=self.actions, gathers=tuple(self.gathers), secondary=frozenset(self.secondary), **more
        )  # fmt: skip

    def _forward(self, calls: Sequence[Call], mode: str, context: Context) -> Context:
        residency = self._residency
        running: list[Any] = []
        residency.begin(mode)
        for event in calls:
            if isinstance(event, Enter):
                unit: Any = _Unit(event.name, tuple(self._stand_ins[b.index] for b in event.buckets))
                running.append(unit)
                self.now = (Moment.FORWARD, unit.name)
                context.use(unit.partitioned)
                residency.enter(unit.partitioned)
                continue
            unit = running[-1]
            if event.called:
                context.calls.append(unit)
            residency.exit(unit.partitioned, keep=True, again=True)
            running.pop()
            self.now = (Moment.FORWARD, running[-1].name if running else "")
        residency.end()
        return context

    def _walker(self) -> Any:
        made: Any = Backward
        backward = made(
            Contexts(), self._residency, None, self._used, comm=None, overlap=False, on_end=lambda synced: None
        )
        self.now = (Moment.BACKWARD, "")
        plain = backward.prefetch

        def prefetch(at: Context) -> None:
            self.ahead = True
            plain(at)
            self.ahead = False

        backward.prefetch = prefetch
        return backward

    def note(self, kind: Kind, bucket: Bucket) -> None:
        moment, unit = self.now
        self.actions.append(
            Action(
                kind=kind, bucket=bucket.index, label=bucket.label, num_bytes=bucket.num_bytes, moment=moment, unit=unit
            )
        )


class _Planned(Residency):
    """The residency of stand-ins."""

    def __init__(
        self, planner: _Planner, stand_ins: list[Any], used: list[Any], prefetch_bytes: int, keep_bytes: int
    ) -> None:
        super().__init__(stand_ins, prefetch_bytes=prefetch_bytes, keep_bytes=keep_bytes)
        self._planner, self._used = planner, used

    def prefetch(self) -> None:
        self._planner.ahead = True
        super().prefetch()
        self._planner.ahead = False

    def clear(self) -> None:
        by_index, self._buckets = self._buckets, self._used
        super().clear()
        self._buckets = by_index

    def settle(self) -> None:
        by_index, self._buckets = self._buckets, self._used
        super().settle()
        self._buckets = by_index

    def _whole_bytes(self) -> int:
        return sum(b.num_bytes for b in self._used if b.presence is not Presence.SHARDED)


class _Unit:
    """What a walk needs of a unit."""

    __slots__ = ("gradients", "name", "partitioned")

    def __init__(self, name: str, partitioned: tuple[Any, ...]) -> None:
        self.name, self.partitioned = name, partitioned
        self.gradients: tuple[Any, ...] = ()


class _StandIn:
    """What the policy needs of a bucket, and of its parameters."""

    partitioned, gradients = True, None

    def __init__(self, planner: _Planner, bucket: Bucket) -> None:
        self._planner, self._bucket = planner, bucket
        self.index, self.spec, self.num_bytes = bucket.index, bucket.spec, bucket.num_bytes
        self.leases, self.active, self.context_serial = 0, 0, -1
        self.parameters = self
        self.presence = Presence.SHARDED
        self.secondary: bool | None = None

    def unshard(self) -> None:
        if self.presence is Presence.SHARDED:
            self.presence = Presence.HIDDEN
            self._planner.gathers.append((self._bucket, self.secondary is not None))
            self._planner.note(Kind.PREFETCH if self._planner.ahead else Kind.UNSHARD, self._bucket)

    def wait(self) -> None:
        self.unshard()

    def reshard(self, *, again: bool = False) -> None:
        if self.presence is not Presence.SHARDED:
            self.presence = Presence.SHARDED
            self._planner.note(Kind.RESHARD, self._bucket)
            if again and self._bucket.secondary_bytes():
                self.secondary = True
                self._planner.secondary.add(self._bucket)

    @property
    def live(self) -> bool:
        return self.presence is not Presence.SHARDED

    def drop_secondary(self) -> None:
        self.secondary = None

    def hide(self) -> None:
        """It has nothing to hide."""

    def advance(self) -> None:
        """It is here at once."""
