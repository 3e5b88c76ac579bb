"""What the runtime does, written down as actions (:mod:`zoo.plan`).

While a recording is on, the methods that carry actions out are replaced on their objects by others that note the action
and go on. So it costs nothing when it is off: there is no flag to look at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from zoo.plan import Action, Actions, Collective, Kind, Moment
from zoo.shard.buckets import Bucket
from zoo.shard.collectives.routes import Hop
from zoo.shard.collectives.rows import RowReduce
from zoo.shard.parameters import Presence

if TYPE_CHECKING:
    from zoo.shard.runtime.hooks import Runtime


@contextlib.contextmanager
def recording(runtime: Runtime, buckets: Sequence[Bucket]) -> Iterator[Actions]:
    """All that happens inside, in the order in which it begins. Recordings may nest."""
    recorder = _Recorder(runtime)
    try:
        recorder.swap(runtime.residency, "prefetch", recorder.ahead)
        recorder.swap(runtime.backward, "prefetch", recorder.ahead)
        recorder.swap(runtime.backward, "vote", recorder.vote)
        for bucket in buckets:
            recorder.watch(bucket)
        yield recorder.actions
    finally:
        recorder.restore()


class _Recorder:
    def __init__(self, runtime: Runtime) -> None:
        self.actions = Actions()
        self._runtime = runtime
        self._ahead = False
        self._restore: list[Callable[[], None]] = []

    # Methods, and what stands in for them ----------------------------------------------------------------------------

    def swap(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put ``wrap(method)`` in the place of a method of one object."""
        before = vars(owner).get(name)
        setattr(owner, name, wrap(getattr(owner, name)))
        self._restore.append(lambda: delattr(owner, name) if before is None else setattr(owner, name, before))

    def restore(self) -> None:
        """Everything is as it was."""
        for undo in reversed(self._restore):
            undo()

    def watch(self, bucket: Bucket) -> None:
        """Note what happens to ``bucket``."""
        parameters, gradients = bucket.parameters, bucket.gradients
        if bucket.partitioned:
            self.swap(parameters, "unshard", lambda method: self._unshard(bucket, method))
            self.swap(parameters, "finish_unshard", lambda method: self._finish_unshard(bucket, method))
            self.swap(parameters, "reshard", lambda method: self._reshard(bucket, method))
        elif bucket.spec.trainable and bucket.placements.states.is_split:
            self.swap(parameters, "publish", lambda method: self._publish(bucket, method))
        if gradients is not None:
            self.swap(gradients, "start_reduce", lambda method: self._reduce(bucket, method))

    # Actions ---------------------------------------------------------------------------------------------------------

    def ahead(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """What is gathered meanwhile is not needed yet."""

        def prefetch(*args: Any) -> Any:
            before, self._ahead = self._ahead, True
            try:
                return method(*args)
            finally:
                self._ahead = before

        return prefetch

    def vote(self, method: Callable[[int], int]) -> Callable[[int], int]:
        """One number is exchanged."""
        size = self._runtime.backward.num_voters

        def vote(wanted: int) -> int:
            self._note(Kind.VOTE, None, collectives=(Collective(op="all_reduce", size=size, num_bytes=8),))
            return method(wanted)

        return vote

    def _unshard(self, bucket: Bucket, method: Callable[..., None]) -> Callable[..., None]:
        parameters, itemsize = bucket.parameters, bucket.spec.dtype.itemsize

        def unshard(*, exact: bool = False) -> None:
            if parameters.presence is Presence.SHARDED:
                kept = parameters.secondary is not None and not (exact and parameters.rounds)
                if exact and parameters.rounds:
                    hops = bucket.routes.exact.hops(bucket.layout.size, itemsize)
                else:
                    hops = bucket.gather_hops(again=kept)
                self._note(Kind.PREFETCH if self._ahead else Kind.UNSHARD, bucket, collectives=_collectives(hops))
            method(exact=exact)

        return unshard

    def _finish_unshard(self, bucket: Bucket, method: Callable[[], None]) -> Callable[[], None]:
        def finish_unshard() -> None:
            self._note(Kind.WAIT, bucket, of=Kind.UNSHARD)
            method()

        return finish_unshard

    def _reshard(self, bucket: Bucket, method: Callable[..., None]) -> Callable[..., None]:
        def reshard(*, again: bool = False) -> None:
            there = bucket.parameters.presence is not Presence.SHARDED
            method(again=again)
            if there:
                self._note(Kind.RESHARD, bucket)

        return reshard

    def _publish(self, bucket: Bucket, method: Callable[..., Any]) -> Callable[..., Any]:
        sent = Collective(op="all_gather", size=bucket.shard_group.size, num_bytes=bucket.num_bytes)

        def publish(*args: Any, **options: Any) -> Any:
            self._note(Kind.PUBLISH, bucket, collectives=(sent,))
            return method(*args, **options)

        return publish

    def _reduce(self, bucket: Bucket, method: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
        # At stage 0 the mean of each chunk goes to everyone, once it is there.
        everyone = Collective(op="all_gather", size=bucket.shard_group.size, num_bytes=bucket.num_gradient_bytes)
        after = () if bucket.placements.states.is_split or bucket.routes.reduces_whole else (everyone,)
        reduce = bucket.routes.reduce
        rows = reduce if isinstance(reduce, RowReduce) else None

        def start_reduce(reduce_dtype: Any) -> Callable[[], None]:
            itemsize = (reduce_dtype or bucket.spec.gradient_dtype).itemsize
            hops = reduce.hops(bucket.layout.size, itemsize) if rows is None else [rows.counts_hop()]
            self._note(Kind.REDUCE, bucket, collectives=_collectives(hops))
            finish = method(reduce_dtype)

            def wait() -> None:
                if rows is None:
                    self._note(Kind.WAIT, bucket, of=Kind.REDUCE, collectives=after)
                    finish()
                    return
                finish()  # what it sends depends on the gradients
                self._note(Kind.WAIT, bucket, of=Kind.REDUCE, collectives=(*_collectives(rows.sent), *after))

            return wait

        return start_reduce

    def _note(
        self, kind: Kind, bucket: Bucket | None, *, of: Kind | None = None, collectives: tuple[Collective, ...] = ()
    ) -> None:
        moment, context, unit = self._runtime.where()
        self.actions.append(
            Action(
                kind=kind, of=of, moment=Moment(moment), context=context, unit=unit, collectives=collectives,
                bucket=bucket.index if bucket is not None else -1,
                label=bucket.label if bucket is not None else "",
                num_bytes=bucket.num_bytes if bucket is not None else 0,
            )
        )  # fmt: skip


def _collectives(hops: Iterable[Hop]) -> tuple[Collective, ...]:
    return tuple(Collective(op=hop.op, size=hop.comm.size, num_bytes=hop.message_bytes) for hop in hops)
