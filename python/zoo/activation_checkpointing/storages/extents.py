"""Which ranges of a file are in use."""

from __future__ import annotations

import bisect

__all__ = ["Extents"]

BLOCK = 4096


class Extents:
    """Ranges of whole blocks of 4096 bytes, first fit from the front; neighbours that are free become one."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (start, length), sorted
        self.end = 0

    @property
    def num_free(self) -> int:
        """Bytes before ``end`` that are in no range."""
        return sum(length for _, length in self._free)

    def take(self, num_bytes: int) -> tuple[int, int]:
        """(start, length) of a range for so many bytes."""
        length = -(-max(num_bytes, 1) // BLOCK) * BLOCK
        for index, (start, there) in enumerate(self._free):
            if there >= length:
                self._free[index : index + 1] = [(start + length, there - length)] if there > length else []
                return start, length
        start, self.end = self.end, self.end + length
        return start, length

    def give(self, start: int, length: int) -> None:
        """A range is free again."""
        index = bisect.bisect(self._free, (start, length))
        if index < len(self._free) and start + length == self._free[index][0]:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            start, before = self._free.pop(index - 1)
            length, index = length + before, index - 1
        if start + length == self.end:
            self.end = start
        else:
            self._free.insert(index, (start, length))
