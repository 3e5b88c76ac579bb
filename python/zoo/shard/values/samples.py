"""Writes that autograd does not count: by NumPy, through DLPack, by a collective of the user's own.

A few elements of each tensor are remembered, and compared when somebody asks. So a tensor that was written as a whole
is found at the price of a few reads; a write to elements between the samples is not.
"""

from __future__ import annotations

import torch

from zoo.layout import FlatLayout

SAMPLES = 4
"""Neighbours in the middle of each tensor: one cache line, which is what a look costs."""


class Samples:
    """Counts changes of the tensors that lie in one flat buffer, by samples.

    Args:
        layout: where the tensors lie.

    Attributes:
        counts: by tensor, how often a change was found; nothing where none was.
    """

    def __init__(self, layout: FlatLayout) -> None:
        places: list[int] = []
        slots: list[int] = []
        for slot, (offset, tensor) in enumerate(zip(layout.offsets, layout.tensors, strict=True)):
            taken = min(SAMPLES, tensor.numel)
            first = offset + (tensor.numel - taken) // 2
            places += range(first, first + taken)
            slots += [slot] * taken
        self._places, self._slots = torch.tensor(places, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
        self._known: torch.Tensor | None = None
        self.counts: dict[int, int] = {}

    def note(self, flat: torch.Tensor) -> None:
        """What ``flat`` (CPU) has now is known."""
        self._known = self._of(flat)

    def forget(self) -> None:
        """There is no buffer any more; nothing counts until the next :meth:`note`."""
        self._known = None

    def look(self, flat: torch.Tensor) -> None:
        """Count what has changed since it was known; it is known then."""
        if self._known is None:
            return
        now = self._of(flat)
        if torch.equal(now, self._known):
            return
        changed = (now != self._known).view(len(self._places), -1).any(dim=1)
        for slot in set(self._slots[changed].tolist()):
            self.counts[slot] = self.counts.get(slot, 0) + 1
        self._known = now

    def _of(self, flat: torch.Tensor) -> torch.Tensor:
        """(samples * bytes of an element) uint8: a NaN is equal to itself."""
        return flat.detach().index_select(0, self._places).view(torch.uint8)
