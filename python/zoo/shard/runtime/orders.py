"""Recorded orders: in which sequence a forward pass needs the partitioned buckets, and what comes next.

Orders are recorded as they happen and kept by mode (training or evaluation, with or without gradients). A pass that
leaves the order it was predicted to follow switches to another recorded order with the same beginning, or is recorded
as a new one; nothing is ever invalidated, and a wrong prediction costs an early gather, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

_MAX_ORDERS = 16  # a mode; the oldest goes


class Orders:
    """Predicts a sequence of bucket indices from the sequences seen before."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[list[int]]] = {}
        self._mode: Hashable = None
        self._seen: list[int] = []
        self._expected: list[int] = []

    def begin(self, mode: Hashable) -> None:
        """A pass begins; the most recently used order of its mode is expected."""
        self._mode = mode
        self._seen = []
        known = self._known.get(mode)
        self._expected = known[-1] if known else []

    def advance(self, index: int) -> None:
        """The pass needs bucket ``index`` now."""
        seen, expected = self._seen, self._expected
        position = len(seen)
        seen.append(index)
        if (position < len(expected) and expected[position] != index) or position >= len(expected) > 0:
            self._expected = next((o for o in self._known[self._mode] if o[: position + 1] == seen), [])

    def upcoming(self) -> Iterator[int]:
        """The buckets expected next, soonest first; nothing when the pass is unknown."""
        expected = self._expected
        for position in range(len(self._seen), len(expected)):
            yield expected[position]

    def end(self) -> None:
        """The pass is over: remember its order as the latest of its mode."""
        seen = self._seen
        if not seen:
            return
        known = self._known.setdefault(self._mode, [])
        if known and known[-1] == seen:
            return
        if seen in known:
            known.remove(seen)
        known.append(seen)
        del known[:-_MAX_ORDERS]
