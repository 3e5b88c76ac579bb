"""What carries actions out: the one place where a bucket's parameters are gathered and released, and gradients reduced.

Who decides (hooks, walks, policies, schedules, the user's verbs) calls an executor; it looks at what is here already,
and starts or waits for what is missing. A recording watches it (``recording.py``); a plan is made by the same policies
on an executor that moves nothing (``planning.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch

from zoo.comm import Communicator, Handle
from zoo.shard.parameters import Presence

if TYPE_CHECKING:
    from zoo.shard.buckets import Bucket

BYTES_UNDER_WAY = 4 << 20
"""Of this rank's shards that are published. Ranks that share memory keep so much of each other's there, and its pages
stay."""

_SHARDED, _UNSHARDING, _HIDDEN = Presence.SHARDED, Presence.UNSHARDING, Presence.HIDDEN


class Watcher(Protocol):
    """Is told of each action, on this rank, before it begins unless said otherwise."""

    def moves(self) -> None:
        """Another unit computes from now on."""

    def unshards(self, bucket: Bucket, *, exact: bool, ahead: bool) -> None:
        """A gather; ``ahead``: nobody needs it yet."""

    def waits(self, bucket: Bucket) -> None:
        """The wait for a gather."""

    def waited(self, bucket: Bucket) -> None:
        """The wait for a gather is over."""

    def resharded(self, bucket: Bucket) -> None:
        """What was gathered has been released."""

    def reduces(self, bucket: Bucket, dtype: torch.dtype | None) -> None:
        """A reduction."""

    def awaits(self, bucket: Bucket) -> None:
        """The wait for a reduction."""

    def reduced(self, bucket: Bucket) -> None:
        """A reduction has been waited for."""

    def publishes(self, bucket: Bucket) -> None:
        """New parameters go to all ranks."""

    def published(self, bucket: Bucket) -> None:
        """They have been waited for."""

    def votes(self, num_ranks: int) -> None:
        """Ranks vote on where their backward goes next."""

    def updates(self) -> None:
        """The gradients of a step are there; the optimizer goes on with them."""


class Executor:
    """Carries out what is decided elsewhere.

    Attributes:
        watchers: who is told.
    """

    def __init__(self) -> None:
        self.watchers: tuple[Watcher, ...] = ()

    def moved(self) -> None:
        """Another unit computes from now on."""
        for watcher in self.watchers:
            watcher.moves()

    def updating(self) -> None:
        """The optimizer takes a step from now on."""
        for watcher in self.watchers:
            watcher.updates()

    # Parameters ------------------------------------------------------------------------------------------------------

    def unshard(self, bucket: Bucket, *, exact: bool = False, ahead: bool = False) -> None:
        """Start gathering what is sharded; ``exact``: see :meth:`wait`; ``ahead``: nobody needs it yet."""
        parameters = bucket.parameters
        if parameters.presence is not _SHARDED:
            return
        for watcher in self.watchers:
            watcher.unshards(bucket, exact=exact, ahead=ahead)
        if bucket.in_turn is not None and not exact:
            bucket.in_turn(bucket)
        else:
            parameters.start(exact=exact)

    def wait(self, bucket: Bucket, *, exact: bool = False) -> None:
        """Gather if needed, wait until the parameters are whole, and show them.

        ``exact``: as the ranks keep them, also where gathering rounds; but what a running forward uses stays.
        """
        parameters = bucket.parameters
        if exact and not bucket.active and not parameters.is_exact:
            self.reshard(bucket)
        if parameters.presence is _SHARDED:
            self.unshard(bucket, exact=exact)
        presence = parameters.presence
        if presence is _UNSHARDING:
            self.finish(bucket)
            parameters.show()
        elif presence is _HIDDEN:
            parameters.show()

    def finish(self, bucket: Bucket) -> None:
        """Wait for the gather that is under way; nobody is shown the parameters yet."""
        for watcher in self.watchers:
            watcher.waits(bucket)
        bucket.parameters.finish()
        for watcher in self.watchers:
            watcher.waited(bucket)

    def hide(self, bucket: Bucket) -> None:
        """Wait for what is under way, and refuse the parameters to everybody until the next ``wait``; they stay."""
        if bucket.parameters.presence is _UNSHARDING:
            self.finish(bucket)
        bucket.parameters.hide()

    def reshard(self, bucket: Bucket, *, again: bool = False) -> None:
        """Free gathered parameters; this rank keeps its shard.

        ``again``: a backward will gather them once more; with hpZ this rank keeps a part of them until then.
        """
        parameters = bucket.parameters
        if not bucket.partitioned or (presence := parameters.presence) is _SHARDED:
            return
        if presence is _UNSHARDING:
            self.finish(bucket)
        if again:
            parameters.keep_part()
        parameters.free()
        for watcher in self.watchers:
            watcher.resharded(bucket)

    def publish(self, bucket: Bucket) -> Handle | None:
        """After an update of this rank's shard: bring it to everyone who keeps the parameters whole."""
        if bucket.partitioned:
            self.reshard(bucket)
            return None
        if not bucket.placements.states.is_split:
            return None
        for watcher in self.watchers:
            watcher.publishes(bucket)
        return bucket.parameters.publish()

    def publish_all(self, buckets: Iterable[Bucket]) -> Callable[[], None]:
        """The same for several, a few megabytes under way at a time; what is returned waits for the last of them."""
        under_way: deque[tuple[Handle, int, Bucket]] = deque()
        num_bytes = 0
        sampled = []

        def wait(handle: Handle, bucket: Bucket) -> None:
            handle.wait()
            for watcher in self.watchers:
                watcher.published(bucket)

        for bucket in buckets:
            if bucket.parameters.samples is not None:
                sampled.append(bucket)
            size = bucket.num_bytes // bucket.num_chunks
            while under_way and num_bytes + size > BYTES_UNDER_WAY:
                handle, done, first = under_way.popleft()
                wait(handle, first)
                num_bytes -= done
            begun = self.publish(bucket)
            if begun is not None:
                under_way.append((begun, size, bucket))
                num_bytes += size

        def finish() -> None:
            for handle, _, last in under_way:
                wait(handle, last)
            for bucket in sampled:
                bucket.parameters.written()

        return finish

    # Gradients, and votes --------------------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket, dtype: torch.dtype | None) -> Callable[[], None]:
        """Start bringing a bucket's gradient to its mean, in ``dtype``; what is returned waits for it."""
        gradients = bucket.gradients
        if gradients is None:
            raise AssertionError(f"a reduction of {bucket.label}, which is frozen.")
        if not self.watchers:
            return gradients.start_reduce(dtype)
        for watcher in self.watchers:
            watcher.reduces(bucket, dtype)
        finish = gradients.start_reduce(dtype)

        def finish_and_tell() -> None:
            for watcher in self.watchers:
                watcher.awaits(bucket)
            finish()
            for watcher in self.watchers:
                watcher.reduced(bucket)

        return finish_and_tell

    def vote(self, comm: Communicator, wanted: int, device: torch.device) -> int:
        """The largest number that any rank wants. Collective."""
        for watcher in self.watchers:
            watcher.votes(comm.size)
        number = torch.tensor([wanted], dtype=torch.int64, device=device)
        comm.all_reduce(number, "max").wait()
        return int(number)
