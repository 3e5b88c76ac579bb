"""What one forward leaves for its backward: the units that ran, and which buckets wait for which of them."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.zero.buckets import Bucket
from zoo.zero.units import UnitSpec


class Unit:
    """A unit at run time: the buckets of its parameters, and how many of its forwards are running."""

    __slots__ = ("_own", "depth", "external", "gradients", "name", "partitioned", "recorded")

    def __init__(self, spec: UnitSpec, buckets: Sequence[Bucket]) -> None:
        self.name = spec.name
        self.depth = 0
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


class Tape:
    """The unit calls of one forward pass that backward will come back to.

    ``units[i]`` is the unit of call i, in the order in which the calls ended; ``order`` holds (i, bucket) where call i
    is the first that may use the bucket: when backward is past i, the bucket is finished.
    """

    __slots__ = ("cursor", "order", "serial", "spent", "units")

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.spent = False  # a backward has been through
        self.units: list[Unit] = []
        self.order: list[tuple[int, Bucket]] = []
        self.cursor = -1  # calls [cursor, len) are done; -1 before backward first comes here

    def __del__(self) -> None:
        # A forward whose outputs were dropped: its buckets wait for it no longer.
        for _, bucket in self.order:
            bucket.pending -= 1
