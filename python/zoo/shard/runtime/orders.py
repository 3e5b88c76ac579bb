"""Recorded orders: in which sequence a forward pass needs the partitioned buckets, and what comes next.

Orders are recorded as they happen and kept by mode (training or evaluation, with or without gradients). A pass that
leaves the order it was predicted to follow switches to another recorded order with the same beginning, or is recorded
as a new one; nothing is ever invalidated, and a wrong prediction costs an early gather, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo.shard.buckets import Bucket

_MAX_ORDERS = 16  # a mode; the oldest goes


class Orders:
    """Predicts a sequence of buckets from the sequences seen before.

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
