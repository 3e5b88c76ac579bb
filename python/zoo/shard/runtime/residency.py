"""Which partitioned buckets are gathered before they are needed, and which stay gathered while nobody uses them.

A policy decides and does nothing. :class:`Residency` asks it at the same points of the program on every rank, and what
follows is collective: it must answer alike everywhere, and so from what it was made with and is given alone. Plans ask
the same object, about buckets that stand for the real ones; of a bucket it may use ``index``, ``mean_bytes``, ``spec``,
``active`` and ``leases``.

Forward and backward go the same way: :meth:`Residency.need` before a bucket is used, :meth:`Residency.prefetch` with
what comes after it, :meth:`Residency.rest` when nobody that runs needs it any more.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from zoo.shard.buckets import Bucket
from zoo.shard.parameters import Presence
from zoo.shard.runtime.executor import Executor

if TYPE_CHECKING:
    from zoo.shard.config import ZeroConfig
    from zoo.shard.placement.units import UnitSpec

REUSE_WINDOW = 4
"""A bucket that one of the next so many acquisitions of the recorded order needs again is not released in between."""

_MAX_ORDERS = 16  # a mode; the oldest goes

_SHARDED, _UNSHARDING = Presence.SHARDED, Presence.UNSHARDING


class ResidencyPolicy:
    """Gathers when somebody needs it, and keeps nothing: where a policy of one's own begins.

    Attributes:
        prefetches: :meth:`ahead` is asked. makes_room: :meth:`room` is.
    """

    prefetches = False
    makes_room = False

    def ahead(self, order: Sequence[Bucket], position: int) -> Iterable[Bucket]:
        """A unit is about to run: what to gather now of the buckets that come after it.

        Args:
            order: all of them are ``order[position:]``, the soonest first, once for each unit that needs them.
        """
        return ()

    def room(self, bucket: Bucket, now: Residency, soon: Collection[Bucket] | None) -> Iterable[Bucket] | None:
        """``bucket`` is about to be gathered: what of ``now.resting`` and ``now.ahead`` to release before that.

        Args:
            soon: it is gathered ahead, after these, which are needed sooner; None: it is needed now.

        Returns:
            None if it is not to be gathered yet, which ends this prefetch.
        """
        return ()

    def rest(self, bucket: Bucket, now: Residency, *, backward: bool) -> Collection[Bucket]:
        """No unit that runs needs ``bucket`` any more: what to release of it and ``now.resting``.

        What is left rests until it is needed again, released, or stale; at the latest an update releases it.

        Args:
            backward: a backward will need it.
        """
        return (bucket,)


class Budgets(ResidencyPolicy):
    """The default: budgets of bytes.

    Args:
        prefetch_bytes: how far ahead of the running unit buckets are gathered.
        keep_bytes: gathered buckets kept after a forward for the backward to come, the latest first.
    """

    def __init__(self, *, prefetch_bytes: int, keep_bytes: int) -> None:
        self.prefetch_bytes, self.keep_bytes = prefetch_bytes, keep_bytes
        self.prefetches = prefetch_bytes > 0

    def ahead(self, order: Sequence[Bucket], position: int) -> Iterable[Bucket]:
        """As far as the budget goes."""
        left = self.prefetch_bytes
        for end in range(position, len(order)):
            left -= order[end].mean_bytes
            if left < 0:
                return order[position:end]
        return order[position:]

    def rest(self, bucket: Bucket, now: Residency, *, backward: bool) -> Collection[Bucket]:
        """What backward needs stays as far as the budget goes, and the latest the longest."""
        if not backward or bucket.mean_bytes > self.keep_bytes:
            return (bucket,)
        over = now.resting_bytes + bucket.mean_bytes - self.keep_bytes
        if over <= 0:
            return ()
        released = []
        for oldest in now.resting:
            released.append(oldest)
            over -= oldest.mean_bytes
            if over <= 0:
                break
        return released


class WindowBudget(ResidencyPolicy):
    """Of a window (``window.py``): whatever is gathered stays, as long as all that is whole has at most so many bytes.

    What has to make room is what was used last. For a model that is gone through again and again from the first unit to
    the last this is the best that can be done (what was used last is needed last), and for one that is gone through
    forwards and backwards in turn it is as good as the other way round.

    Args:
        outside: the policy outside of the window, which says what is gathered ahead.
    """

    makes_room = True

    def __init__(self, max_bytes: int, outside: ResidencyPolicy) -> None:
        self._max_bytes, self.prefetches, self.ahead = max_bytes, outside.prefetches, outside.ahead  # type: ignore[method-assign]

    def room(self, bucket: Bucket, now: Residency, soon: Collection[Bucket] | None) -> Iterable[Bucket] | None:
        """As much as is there; what is gathered ahead makes room only for what is needed now."""
        over = now.whole_bytes() + bucket.mean_bytes - self._max_bytes
        released: dict[Bucket, None] = {}
        for victim in (*reversed(now.resting), *(reversed(now.ahead) if soon is None else ())):
            if over <= 0:
                break
            if not victim.active and victim not in (soon or ()) and victim not in released:
                released[victim] = None
                over -= victim.mean_bytes
        return None if over > 0 and soon is not None else released

    def rest(self, bucket: Bucket, now: Residency, *, backward: bool) -> Collection[Bucket]:
        """It stays where there is room for it."""
        return (bucket,) if now.whole_bytes() > self._max_bytes else ()


class Orders:
    """Predicts in which sequence a forward needs the partitioned buckets, from the sequences seen before.

    They are kept by mode (training or evaluation, with or without gradients). A pass that leaves the order it was
    predicted to follow switches to another recorded order with the same beginning, or is recorded as a new one; nothing
    is ever invalidated, and a wrong prediction costs an early gather, never a wrong result.

    Attributes:
        seen: of this pass. expected: of all of it; what comes next is ``expected[len(seen):]``.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, list[list[Bucket]]] = {}
        self._mode: Hashable = None
        self.seen: list[Bucket] = []
        self.expected: list[Bucket] = []

    def begin(self, mode: Hashable) -> None:
        """A pass begins; the most recently used order of its mode is expected."""
        self._mode = mode
        self.seen = []
        known = self._known.get(mode)
        self.expected = known[-1] if known else []

    def advance(self, bucket: Bucket) -> None:
        """The pass needs ``bucket`` now."""
        seen, expected = self.seen, self.expected
        position = len(seen)
        seen.append(bucket)
        if position < len(expected):
            if expected[position] is bucket:
                return
        elif not expected:
            return
        self.expected = next((o for o in self._known[self._mode] if o[: position + 1] == seen), [])

    def end(self) -> None:
        """The pass is over: remember its order as the latest of its mode."""
        seen = self.seen
        if not seen:
            return
        known = self._known.setdefault(self._mode, [])
        if known and known[-1] == seen:
            return
        if seen in known:
            known.remove(seen)
        known.append(seen)
        del known[:-_MAX_ORDERS]


class Residency:
    """Gathers and releases the partitioned ones of ``buckets``, as a policy decides.

    Attributes:
        policy: the one that is asked.
        resting: whole, and nobody uses them; the one that has rested longest is first. resting_bytes: of them.
        ahead: gathered, and not used since.
        orders: in which buckets are needed.
    """

    def __init__(self, buckets: Sequence[Bucket], executor: Executor, policy: ResidencyPolicy) -> None:
        self._buckets = [b for b in buckets if b.partitioned]
        self._executor = executor
        self.orders = Orders()
        self.resting: dict[Bucket, None] = {}
        self.resting_bytes = 0
        self.ahead: dict[Bucket, None] = {}
        self.use(policy)

    def use(self, policy: ResidencyPolicy) -> None:
        """Ask this one from now on."""
        self.policy = policy
        self.prefetches, self._makes_room = policy.prefetches, policy.makes_room

    # Forward ---------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """A pass is over: what was prefetched and not used was a wrong prediction."""
        self.orders.end()
        ahead, self.ahead = self.ahead, {}
        for bucket in ahead:
            if not bucket.active:
                self._executor.reshard(bucket)

    def enter(self, buckets: Sequence[Bucket]) -> None:
        """A unit that uses these partitioned buckets is about to run."""
        for bucket in buckets:  # first of all: what fails below leaves each of them counted once
            bucket.active += 1
        for bucket in buckets:
            self.need(bucket)
            self.orders.advance(bucket)
        if self.prefetches:
            self.prefetch(self.orders.expected, len(self.orders.seen))
        for bucket in buckets:
            self._executor.wait(bucket)

    def enter_late(self, bucket: Bucket) -> None:
        """A unit that runs uses ``bucket`` from now on."""
        self.need(bucket)
        self.orders.advance(bucket)
        self._executor.wait(bucket)

    def exit(self, buckets: Sequence[Bucket], *, backward: bool) -> None:
        """It has run; ``backward``: one will need them."""
        for bucket in buckets:
            bucket.active -= 1
            if bucket.active:
                continue
            if len(bucket.spec.units) > 1 and not self._makes_room and self._is_soon(bucket):
                self.ahead[bucket] = None  # the next unit of the same bucket is about to start
                self._executor.hide(bucket)
            else:
                self.rest(bucket, backward=backward)

    def _is_soon(self, bucket: Bucket) -> bool:
        if bucket.parameters.presence is _SHARDED:  # its gather failed
            return False
        position = len(self.orders.seen)
        return bucket in self.orders.expected[position : position + REUSE_WINDOW]

    # Forward and backward --------------------------------------------------------------------------------------------

    def need(self, bucket: Bucket) -> None:
        """A unit that is about to run needs ``bucket``: begin to gather it unless it is here."""
        if bucket.parameters.presence is _SHARDED:
            for victim in (self.policy.room(bucket, self, None) or ()) if self._makes_room else ():
                self._release(victim)
            self._executor.unshard(bucket)
        elif bucket in self.resting:
            del self.resting[bucket]
            self.resting_bytes -= bucket.mean_bytes
        elif bucket in self.ahead:
            del self.ahead[bucket]

    def _take(self, bucket: Bucket) -> None:
        """It neither rests nor is it here for later."""
        if bucket in self.resting:
            del self.resting[bucket]
            self.resting_bytes -= bucket.mean_bytes
        elif bucket in self.ahead:
            del self.ahead[bucket]

    def prefetch(self, order: Sequence[Bucket], position: int) -> None:
        """Gather what the policy wants of ``order[position:]``, which is needed next."""
        under_way, soon = list(self.ahead), list[Bucket]()
        for bucket in self.policy.ahead(order, position):
            if bucket.parameters.presence is _SHARDED:
                room = self.policy.room(bucket, self, soon) if self._makes_room else ()
                if room is None:
                    break
                for victim in room:
                    self._release(victim)
                self.ahead[bucket] = None
                self._executor.unshard(bucket, ahead=True)
            if self._makes_room:
                soon.append(bucket)
        for bucket in under_way:
            if bucket.parameters.presence is _UNSHARDING:  # for a unit's time by now
                bucket.parameters.advance()

    def rest(self, bucket: Bucket, *, backward: bool) -> None:
        """No unit that runs needs ``bucket`` any more; ``backward``: one that comes later will."""
        if bucket.active or bucket.parameters.presence is _SHARDED:
            return
        if bucket in self.resting or bucket in self.ahead:
            self._take(bucket)
        released = self.policy.rest(bucket, self, backward=backward)
        if not released or bucket not in released:
            self._executor.hide(bucket)
            self.resting[bucket] = None
            self.resting_bytes += bucket.mean_bytes
        for victim in released:
            if victim is not bucket:
                self._release(victim)
            else:
                self._executor.reshard(bucket, again=bucket.leases > 0)

    def _release(self, bucket: Bucket) -> None:
        self._take(bucket)
        if not bucket.active:
            self._executor.reshard(bucket, again=bucket.leases > 0)

    # Ends ------------------------------------------------------------------------------------------------------------

    def settle(self, *, driven: bool) -> None:
        """A backward is over, and with it what it gathered beside its walk (to recompute), and what was kept for it.

        ``driven``: what rests is for the others of a window.
        """
        for bucket in self._buckets:
            if bucket.parameters.presence is not _SHARDED and not (driven and bucket in self.resting):
                self.rest(bucket, backward=False)
            if not (driven and bucket.leases):
                bucket.parameters.secondary = None
        self.ahead.clear()

    def forget(self, bucket: Bucket) -> None:
        """What is gathered of this bucket is stale; the next use gathers it again."""
        self._take(bucket)
        if not bucket.active:
            self._executor.reshard(bucket)

    def clear(self) -> None:
        """Release everything that nobody uses."""
        self.resting.clear()
        self.ahead.clear()
        self.resting_bytes = 0
        for bucket in self._buckets:
            if bucket.parameters.presence is not _SHARDED and not bucket.active:
                self._executor.reshard(bucket)
            bucket.parameters.secondary = None

    def whole_bytes(self) -> int:
        """Of all that is whole, or on its way."""
        return sum(b.mean_bytes for b in self._buckets if b.parameters.presence is not _SHARDED)


def budgets_of(buckets: Sequence[Bucket], units: Sequence[UnitSpec], config: ZeroConfig, *, spans: bool) -> Budgets:
    """What ``prefetch_bucket_size`` and ``max_live_parameters`` say; by default what follows from the model.

    Args:
        spans: some bucket is split over more than one rank. One rank gathers by copying its own shard from memory:
            there is nothing to overlap.
    """
    inner, outer = _largest(buckets, units)
    reads = any(b.parameters_on_nvme for b in buckets)
    stages = 2 if reads or config.mics_hierarchical_params_gather else 1  # each has a unit's time
    itemsize = buckets[0].spec.dtype.itemsize

    def budget(elements: int | None, default: int) -> int:
        return default if elements is None else elements * itemsize

    ahead = (spans or reads) and not config.divergent
    return Budgets(
        prefetch_bytes=budget(config.prefetch_bucket_size, stages * (inner or outer)) if ahead else 0,
        keep_bytes=budget(config.max_live_parameters, max(2 * inner + outer, 2**22 * itemsize)),
    )


def _largest(buckets: Sequence[Bucket], specs: Sequence[UnitSpec]) -> tuple[int, int]:
    """Bytes of the largest partitioned bucket of units without others inside of them, and of the others.

    These are whole while all inside of them runs: nothing gathers them ahead, and they come first in backward.
    """
    parts = [spec.name.split(".") for spec in specs if spec.name]
    around = {"", *(".".join(path[:i]) for path in parts for i in range(1, len(path)))} if len(specs) > 1 else set()
    sizes = [0, 0]
    for bucket in buckets:
        if bucket.partitioned:
            kind = any(unit in around for unit in bucket.spec.units)
            sizes[kind] = max(sizes[kind], bucket.mean_bytes)
    return sizes[0], sizes[1]
