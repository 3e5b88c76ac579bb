"""Which gathered buckets stay in memory: prefetched ones, and those that backward will soon need again.

A *window* (``window.py``) has a policy of its own: whatever is gathered stays, as long as all that is whole has at most
its bytes; what has to make room is what was used last. For a model that is gone through again and again from the first
unit to the last this is the best that can be done (what was used last is needed last), and for one that is gone
through forwards and backwards in turn it is as good as the other way round.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import islice

from zoo.shard.buckets import Bucket
from zoo.shard.parameters import Presence
from zoo.shard.runtime.orders import Orders

_SHARDED, _UNSHARDING = Presence.SHARDED, Presence.UNSHARDING

REUSE_WINDOW = 4
"""A bucket that one of the next so many acquisitions of the recorded order needs again is not released in between."""


class Residency:
    """Gathers ahead, and keeps what was gathered, within budgets of bytes.

    Args:
        prefetch_bytes: how far ahead of the running unit buckets are gathered.
        keep_bytes: gathered buckets kept after a forward for the backward to come, the latest first.

    Attributes:
        window_bytes: of all that is whole, while a window with a budget is open; None otherwise.
    """

    def __init__(self, buckets: Sequence[Bucket], *, prefetch_bytes: int, keep_bytes: int) -> None:
        self._buckets = buckets
        self.prefetch_bytes, self.keep_bytes = prefetch_bytes, keep_bytes
        self.window_bytes: int | None = None
        self.orders = Orders()
        self._kept: dict[Bucket, None] = {}
        self._kept_bytes = 0
        self._ahead: dict[Bucket, None] = {}  # prefetched in this forward, not used yet

    def begin(self, mode: Hashable) -> None:
        """A pass begins."""
        self.orders.begin(mode)

    def end(self) -> None:
        """A pass is over: what was prefetched and not used was a wrong prediction."""
        self.orders.end()
        ahead, self._ahead = self._ahead, {}
        for bucket in ahead:
            if not bucket.active:
                bucket.parameters.reshard()

    def enter(self, buckets: Sequence[Bucket]) -> None:
        """A unit that uses these partitioned buckets is about to run."""
        for bucket in buckets:  # first of all: what fails below leaves each of them counted once
            bucket.active += 1
        for bucket in buckets:
            self.claim(bucket)
        if self.prefetch_bytes:
            self.prefetch()
        for bucket in buckets:
            bucket.parameters.wait()

    def exit(self, buckets: Sequence[Bucket], *, keep: bool, again: bool) -> None:
        """It has run; ``keep``, ``again``: see :meth:`set_aside`."""
        for bucket in buckets:
            bucket.active -= 1
            if bucket.active == 0:
                self.set_aside(bucket, keep=keep, again=again)

    def claim(self, bucket: Bucket) -> None:
        """A unit that is about to run needs ``bucket``: begin to gather it unless it is here."""
        parameters = bucket.parameters
        if parameters.presence is not _SHARDED:
            self.unkeep(bucket)
            self._ahead.pop(bucket, None)
        else:
            if self.window_bytes is not None:
                self._make_room(bucket)
            parameters.unshard()
        self.orders.advance(bucket.index)

    def prefetch(self) -> None:
        """Gather what the recorded order needs next."""
        ahead = 0
        soon: list[Bucket] = []
        under_way = [
            bucket for bucket in self._ahead if bucket.parameters.presence is _UNSHARDING
        ]  # for a unit's time by now
        for index in self.orders.upcoming():
            bucket = self._buckets[index]
            ahead += bucket.num_bytes
            if ahead > self.prefetch_bytes:
                break
            if not bucket.parameters.live:
                if not self.may_prefetch(bucket, soon):
                    break
                self._ahead[bucket] = None
                bucket.parameters.unshard()
            soon.append(bucket)
        for bucket in under_way:
            bucket.parameters.advance()

    def set_aside(self, bucket: Bucket, *, keep: bool, again: bool) -> None:
        """No unit that runs needs ``bucket`` any more.

        Args:
            keep: a backward will need it.
            again: what hpZ keeps of it is to be kept.
        """
        if bucket.parameters.presence is _SHARDED:
            return  # its gather failed
        if self.window_bytes is not None:
            self._rest(bucket, again=again)
            return
        if len(bucket.spec.units) > 1 and bucket.index in islice(self.orders.upcoming(), REUSE_WINDOW):
            self._ahead[bucket] = None  # the next unit of the same bucket is about to start
            bucket.parameters.hide()
            return
        if keep:
            self._keep(bucket, again=again)
        else:
            bucket.parameters.reshard(again=again)

    def put_back(self, bucket: Bucket) -> None:
        """Backward is past the first use of ``bucket`` in one forward; another forward waits for its own backward."""
        if not bucket.partitioned or bucket.active or bucket.parameters.presence is _SHARDED:
            return
        if self.window_bytes is not None:
            self._rest(bucket, again=True)
            return
        self.unkeep(bucket)
        self._keep(bucket, again=True)

    def _keep(self, bucket: Bucket, *, again: bool) -> None:
        """A backward will need ``bucket``: it stays gathered as far as the budget goes, and the latest the longest."""
        if bucket.num_bytes > self.keep_bytes:
            bucket.parameters.reshard(again=again)
            return
        if bucket.parameters.presence is _UNSHARDING:
            bucket.parameters.finish_unshard()
        bucket.parameters.hide()
        if bucket not in self._kept:
            self._kept_bytes += bucket.num_bytes
        self._kept[bucket] = None
        while self._kept_bytes > self.keep_bytes:
            oldest = next(iter(self._kept))
            self.unkeep(oldest)
            oldest.parameters.reshard(again=True)

    def unkeep(self, bucket: Bucket) -> None:
        """It no longer counts against the budget."""
        if bucket in self._kept:
            del self._kept[bucket]
            self._kept_bytes -= bucket.num_bytes

    def forget(self, bucket: Bucket) -> None:
        """What is gathered of this bucket is stale; the next use gathers it again."""
        self.unkeep(bucket)
        self._ahead.pop(bucket, None)
        if not bucket.active:
            bucket.parameters.reshard()

    def clear(self) -> None:
        """Release everything that nobody uses."""
        self._kept.clear()
        self._ahead.clear()
        self._kept_bytes = 0
        for bucket in self._buckets:
            parameters = bucket.parameters
            if bucket.partitioned and not bucket.active and parameters.presence is not _SHARDED:
                parameters.reshard()
            if parameters.secondary is not None:
                parameters.drop_secondary()

    # Backward, and windows -------------------------------------------------------------------------------------------

    def open(self, bucket: Bucket) -> None:
        """Backward needs ``bucket`` now, and until :meth:`finish`."""
        self.unkeep(bucket)
        if self.window_bytes is not None:
            self._ahead.pop(bucket, None)
            if bucket.parameters.presence is _SHARDED:
                self._make_room(bucket)
        bucket.parameters.wait()

    def finish(self, bucket: Bucket, *, again: bool) -> None:
        """A driven backward is past the first use of ``bucket``; ``again``: there are others to come."""
        if bucket.active or bucket.parameters.presence is _SHARDED:
            return
        if self.window_bytes is not None:
            self._rest(bucket, again=again)
        else:
            self.unkeep(bucket)
            bucket.parameters.reshard(again=again)

    def settle(self) -> None:
        """A driven backward is over: what it gathered beside its walk (to recompute) is not used any more."""
        for bucket in self._buckets:
            if bucket.partitioned and not bucket.active and bucket not in self._kept:
                self._ahead.pop(bucket, None)
                self.finish(bucket, again=bucket.leases > 0)
            if not bucket.leases and bucket.parameters.secondary is not None:
                bucket.parameters.drop_secondary()

    def may_prefetch(self, bucket: Bucket, soon: Collection[Bucket]) -> bool:
        """Whether there is room for ``bucket``; in a window room is made for it, except of what is needed ``soon``."""
        if self.window_bytes is None or bucket.parameters.presence is _UNSHARDING:
            return True
        return self._make_room(bucket, spare=soon, must=False)

    def note_prefetched(self, bucket: Bucket) -> None:
        """Backward has begun to gather ``bucket``: in a window it may have to make room again."""
        if self.window_bytes is not None and bucket.parameters.presence is _UNSHARDING:
            self._ahead[bucket] = None

    def _whole_bytes(self) -> int:
        return sum(b.num_bytes for b in self._buckets if b.partitioned and b.parameters.presence is not _SHARDED)

    def _make_room(self, bucket: Bucket, *, spare: Collection[Bucket] = (), must: bool = True) -> bool:
        """Release what rests, the latest first, until ``bucket`` fits; with ``must`` as far as possible, or nothing."""
        over = self._whole_bytes() + bucket.num_bytes - (self.window_bytes or 0)
        victims = []
        for victim in (*reversed(self._kept), *(reversed(self._ahead) if must else ())):
            if over <= 0:
                break
            if not victim.active and victim not in spare and victim not in victims:
                victims.append(victim)
                over -= victim.num_bytes
        if over > 0 and not must:
            return False
        for victim in victims:
            self.unkeep(victim)
            self._ahead.pop(victim, None)
            victim.parameters.reshard(again=victim.leases > 0)
        return True

    def _rest(self, bucket: Bucket, *, again: bool) -> None:
        """Nobody needs ``bucket`` now: it stays if all that is whole is within the window's bytes."""
        self.unkeep(bucket)
        if self._whole_bytes() > (self.window_bytes or 0):
            bucket.parameters.reshard(again=again)
            return
        bucket.parameters.hide()
        self._kept[bucket] = None
        self._kept_bytes += bucket.num_bytes
