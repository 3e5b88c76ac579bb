"""What the runtime does, written down as actions (:mod:`zoo.plan`), by a watcher of the executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch

from zoo.cost.collectives import Hop
from zoo.plan import Action, Actions, Collective, Kind, Moment
from zoo.shard.buckets import Bucket
from zoo.shard.collectives.rows import RowReduce

if TYPE_CHECKING:
    from zoo.shard.runtime.hooks import Runtime


Where: TypeAlias = tuple[str, str, str]
Work: TypeAlias = Callable[[str, str], tuple[int, int]]
"""(moment, unit) → FLOPs and bytes since the call before."""


@contextlib.contextmanager
def recording(runtime: Runtime, work: Work | None = None) -> Iterator[Actions]:
    """All that happens inside, in the order in which it begins. Recordings may nest."""
    executor, recorder = runtime.executor, Recorder(runtime.where, work)
    executor.watchers += (recorder,)
    try:
        yield recorder.actions
        recorder.moves()
    finally:
        executor.watchers = tuple(w for w in executor.watchers if w is not recorder)


class Recorder:
    """Writes actions down; see :class:`~zoo.shard.runtime.executor.Watcher`.

    Args:
        where: what runs now, see :meth:`Runtime.where`.
        work: what has been computed since it was asked the last time, and what is asked for, (moment, unit); None:
            computations are no part of the list.
    """

    def __init__(self, where: Callable[[], Where], work: Work | None = None) -> None:
        self.actions = Actions()
        self._where, self._work = where, work
        self._place = where()  # of what is being computed

    def moves(self) -> None:
        """What was computed so far is a computation by itself."""
        if self._work is None:
            return
        moment, context, unit = self._place
        flops, num_bytes = self._work(moment, unit)
        self._place = self._where()
        if flops or num_bytes:
            self.actions.append(
                Action(
                    kind=Kind.COMPUTE, moment=Moment(moment), context=context, unit=unit, flops=flops,
                    num_bytes=num_bytes,
                )
            )  # fmt: skip

    def unshards(self, bucket: Bucket, *, exact: bool, ahead: bool) -> None:
        """A gather, from all ranks or from what hpZ keeps."""
        parameters = bucket.parameters
        if exact and parameters.rounds:
            hops = bucket.routes.exact.hops(bucket.layout.size, bucket.spec.dtype.itemsize)
        else:
            hops = bucket.gather_hops(again=parameters.secondary is not None)
        self._note(Kind.PREFETCH if ahead else Kind.UNSHARD, bucket, collectives=_collectives(hops))

    def waits(self, bucket: Bucket) -> None:
        """For a gather."""
        self._note(Kind.WAIT, bucket, of=Kind.UNSHARD)

    def waited(self, bucket: Bucket) -> None:
        """The wait was the action."""

    def resharded(self, bucket: Bucket) -> None:
        """A release."""
        self._note(Kind.RESHARD, bucket)

    def publishes(self, bucket: Bucket) -> None:
        """New parameters."""
        sent = Collective(op="all_gather", size=bucket.shard_group.size, num_bytes=bucket.num_bytes)
        self._note(Kind.PUBLISH, bucket, collectives=(sent,))

    def reduces(self, bucket: Bucket, dtype: torch.dtype | None) -> None:
        """A reduction; of rows, what is known of it: the exchange of their numbers."""
        reduce, itemsize = bucket.routes.reduce, (dtype or bucket.spec.gradient_dtype).itemsize
        rows = isinstance(reduce, RowReduce)
        hops = [reduce.counts_hop()] if rows else reduce.hops(bucket.layout.size, itemsize)  # type: ignore[attr-defined]
        self._note(Kind.REDUCE, bucket, collectives=_collectives(hops))

    def awaits(self, bucket: Bucket) -> None:
        """See :meth:`reduced`."""

    def published(self, bucket: Bucket) -> None:
        """To publish was the action."""

    def reduced(self, bucket: Bucket) -> None:
        """The rest of it: rows, and at stage 0 the mean of each chunk, which goes to everyone."""
        reduce = bucket.routes.reduce
        sent = _collectives(reduce.sent) if isinstance(reduce, RowReduce) else ()
        if not (bucket.placements.states.is_split or bucket.routes.reduces_whole):
            size = bucket.shard_group.size
            sent += (Collective(op="all_gather", size=size, num_bytes=bucket.num_gradient_bytes),)
        self._note(Kind.WAIT, bucket, of=Kind.REDUCE, collectives=sent)

    def votes(self, num_ranks: int) -> None:
        """One number is exchanged."""
        self._note(Kind.VOTE, None, collectives=(Collective(op="all_reduce", size=num_ranks, num_bytes=8),))

    def updates(self) -> None:
        """What it does to parameters is told by itself."""

    def _note(
        self, kind: Kind, bucket: Bucket | None, *, of: Kind | None = None, collectives: tuple[Collective, ...] = ()
    ) -> None:
        self.moves()
        moment, context, unit = self._where()
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
