"""What forwards leave for backward: contexts, and the leases that they hold on buckets.

A *context* is the record of one pass through the model: which units ran, in the order in which their calls ended, and
which buckets they used. It holds a *lease* on each of these buckets until backward is past the bucket's first use: a
bucket on which a context still has a lease is neither released nor reduced before its time.

Contexts begin and end with what every rank does alike, and with nothing else:

* a pass with gradients opens one (calls of single modules, one after the other, share one, as long as none repeats);
* a backward closes the contexts that it went through, unless it retains their graph;
* every update takes the leases of all others away: they *expire*, as nobody may go back through them any more.

Contexts that a schedule drives (``window.py``) are apart from these: they begin and end by its verbs only, and never
expire.

So the order of collectives does not depend on which outputs a rank keeps, or on when Python drops them. A backward
through an expired or a closed context is legal: it takes the leases back first (:meth:`Contexts.reopen`).
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from zoo.shard.buckets import Bucket
from zoo.shard.placement.units import UnitSpec

MOST_OPEN = 4096
"""Forwards that may wait for their backward; the oldest expires when there is one more."""


class Unit:
    """A unit at run time: the buckets of its parameters, and how many of its forwards are running."""

    __slots__ = (
        "_own", "depth", "entered", "external", "gradients", "hooks", "key", "module", "name", "partitioned",
        "recorded", "within",
    )  # fmt: skip

    def __init__(self, spec: UnitSpec, buckets: Sequence[Bucket]) -> None:
        self.key = self.name = spec.name  # as construction found it, and as it is now
        self.module = spec.module
        self.within: frozenset[Unit] = frozenset()  # units that it is part of
        self.depth, self.entered = 0, 0  # in which pass it was called last
        self.hooks: tuple[Any, ...] = ()  # handles: of what is called where its forward begins, and where it ends
        self.external: dict[Bucket, None] = {}
        self._own = tuple(buckets)
        self._list()

    def _list(self) -> None:
        buckets = (*self._own, *(b for b in self.external if b not in self._own))
        self.partitioned = tuple(b for b in buckets if b.partitioned)
        self.gradients = tuple(b.gradients for b in buckets if b.gradients is not None)
        self.recorded = tuple(b for b in buckets if b.partitioned or b.spec.trainable)

    def set_external(self, bucket: Bucket, *, present: bool) -> bool:
        """Use a bucket that another unit owns, or stop using it; whether that changed anything."""
        if (bucket in self.external) == present or bucket in self._own:
            return False
        if present:
            self.external[bucket] = None
        else:
            del self.external[bucket]
        self._list()
        return True


class Phase(enum.Enum):
    """Where a context is in its life."""

    OPEN = "open"
    """It holds leases; a backward is expected."""
    WALKED = "walked"
    """A backward that is running went through it."""
    EXPIRED = "expired"
    """It holds no leases: nobody came, or a backward has been through."""


FAILED = (
    "the latest backward ended with an exception, and what it left of the gradients is undefined: call zero_grad() "
    "before the next backward or step."
)


class BackwardPart(enum.Enum):
    """What a driven backward computes."""

    WHOLE = "backward"
    INPUTS = "backward_inputs"
    """Gradients of inputs: it gathers as it goes, and accumulates nothing."""
    WEIGHTS = "backward_weights"
    """Gradients of weights, which the caller brings to the buckets: it gathers nothing, and the hooks do nothing."""


class Context:
    """One pass.

    ``calls[i]`` is the unit of call i, in the order in which the calls ended; ``uses`` holds (i, bucket) where call i
    is the first that may use the bucket: once backward is past i it is done with the bucket. ``cursor`` and ``left``
    are where a backward is: calls [cursor, len) and uses [left, len) are done. ``owner`` is what a schedule calls it;
    empty for a context of the hooks. ``returned``: buckets of parameters that a call returned as they are, whose
    gradients may come before those of anything that it computed.
    """

    __slots__ = (
        "__weakref__", "calls", "cursor", "left", "owner", "phase", "returned", "roots", "serial", "updates", "uses",
    )  # fmt: skip

    def __init__(self, serial: int, updates: int, owner: str = "") -> None:
        self.serial, self.owner = serial, owner
        self.updates = updates  # of the parameters, before it
        self.phase = Phase.OPEN
        self.roots: set[Unit] = set()
        self.returned: dict[Bucket, None] = {}
        self.calls: list[Unit] = []
        self.uses: list[tuple[int, Bucket]] = []
        self.left = 0
        self.cursor = -1  # before backward first comes here

    @property
    def name(self) -> str:
        """For people."""
        return self.owner or f"pass {self.serial}"

    def use(self, buckets: Sequence[Bucket]) -> None:
        """A unit that uses these buckets has started."""
        serial, start = self.serial, len(self.calls)
        for bucket in buckets:
            if bucket.context_serial != serial:
                bucket.context_serial = serial
                bucket.leases += 1
                self.uses.append((start, bucket))
                self.left += 1

    def rewind(self) -> None:
        """The next backward begins at the end again."""
        self.cursor, self.left = -1, len(self.uses)


class Contexts:
    """The contexts of one model; the first one gets the number after ``latest``."""

    def __init__(self, latest: int = 0) -> None:
        self.open: list[Context] = []  # of the hooks, the oldest first
        self.driven: list[Context] = []  # of a schedule
        self.updates = 0  # values that the parameters have had, those of a load among them
        self._counted: Callable[[], Callable[[], int] | None] = lambda: None
        self.latest = latest
        # Only for a rank that other ranks tell of one; what it is used for is the same whether it is there or not.
        self._known: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()

    def count_by(self, counts: Callable[[], int]) -> None:
        """Updates are what this method of an optimizer or an engine says, as long as that exists."""
        self._counted = weakref.WeakMethod(counts)

    def num_updates(self) -> int:
        """Updates so far, without those that were skipped; of a model without optimizer: changes of its values."""
        counts = self._counted()
        return self.updates if counts is None else counts()

    def begin(self, unit: Unit) -> Context:
        """The context of a pass that begins with ``unit``: the latest one, if this goes on where it ended."""
        if self.open:
            latest = self.open[-1]
            fits = latest.phase is Phase.OPEN and latest.cursor < 0 and latest.updates == self.updates
            if fits and unit.name and unit not in latest.roots and not any(not u.name for u in latest.roots):
                latest.roots.add(unit)
                return latest
        self.latest += 1
        made = Context(self.latest, self.updates)
        made.roots.add(unit)
        self.open.append(made)
        self._known[made.serial] = made
        if len(self.open) > MOST_OPEN:
            self.expire(self.open[:1])
        return made

    def drive(self, owner: str) -> Context:
        """A context that only :meth:`close` ends."""
        self.latest += 1
        made = Context(self.latest, self.updates, owner)
        self.driven.append(made)
        return made

    def close(self, context: Context) -> None:
        """End a driven context: whatever leases it still has are gone."""
        self._end_leases(context)
        self.driven.remove(context)

    def reopen(self, context: Context) -> None:
        """A backward comes through a context without leases: it takes them again."""
        self.lease_again(context)
        context.phase = Phase.OPEN
        self.open.append(context)
        self.open.sort(key=lambda c: c.serial)

    @staticmethod
    def lease_again(context: Context) -> None:
        """The next backward goes through all of a context that has no leases any more."""
        context.rewind()
        for _, bucket in context.uses:
            bucket.leases += 1

    def find(self, serial: int) -> Context | None:
        """The context of this number, if it exists on this rank."""
        return self._known.get(serial)

    def refuse_older(self) -> None:
        """The parameters have other values: no backward may go through a forward from before."""
        self.expire()
        self.updates += 1

    def refuse_driven(self) -> None:
        """Raise RuntimeError if a schedule has not brought a forward back."""
        waiting = [context.owner for context in self.driven if context.calls]
        if waiting:
            raise RuntimeError(
                f"a step with {len(waiting)} open micro-batch(es): {', '.join(waiting[:5])}. Run the backward of each "
                "first, or end it: window.end(key)."
            )

    def expire(self, which: Sequence[Context] | None = None) -> None:
        """Take the leases of these contexts away; of all that nobody drives by default."""
        gone = self.open if which is None else which
        for context in gone:
            self._end_leases(context)
        self.open = [context for context in self.open if context.phase is not Phase.EXPIRED]

    @staticmethod
    def _end_leases(context: Context) -> None:
        for _, bucket in context.uses[: context.left]:
            bucket.leases -= 1
        context.left = 0
        context.phase = Phase.EXPIRED
