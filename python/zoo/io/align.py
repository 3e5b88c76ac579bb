"""Ranges cut at block boundaries."""

from __future__ import annotations

from typing import NamedTuple

from zoo.io import _native


class AlignedSplit(NamedTuple):
    """A byte range in three parts that lie end to end; ``len(part)`` is its size in bytes, any may be empty."""

    head: range
    """Bytes before the first block boundary, always fewer than a block."""
    middle: range
    """Whole blocks: when not empty, start and stop are multiples of the alignment."""
    tail: range
    """Bytes after the last block boundary, always fewer than a block."""


def split_aligned(offset: int, num_bytes: int, alignment: int) -> AlignedSplit:
    """Cut ``[offset, offset + num_bytes)`` at multiples of ``alignment``.

    ::

        first = ceil(offset / alignment) · alignment
        last  = floor((offset + num_bytes) / alignment) · alignment
        head, middle, tail = [offset, first), [first, last), [last, offset + num_bytes)

    A range with no boundary in it (``last < offset``) is all head.

    Args:
        offset: first byte, 0 or more.
        num_bytes: length in bytes, 0 or more.
        alignment: block size in bytes, a power of two.

    Raises:
        ValueError: a negative number, an alignment that is not a power of two, or an end past 64 bits.
    """
    for name, value in (("offset", offset), ("num_bytes", num_bytes), ("alignment", alignment)):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{name} = {value}; allowed is 0 to 2**64 - 1 (bytes)")
    return AlignedSplit(*(range(*part) for part in _native.split_aligned(offset, num_bytes, alignment)))
