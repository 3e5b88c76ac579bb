"""What a lossy collective leaves out: kept, prepared, committed or rolled back; and handed over to other ranks.

Legend: D ranks, n elements, m those of a rank's chunk; x_r what rank r gives, e_r its *worker error*, s its chunk of
the *server error*, C the codec.

    c_r = x_r + e_r,         e_r' = c_r - C(c_r)
    z   = 1/D Σ_r C(c_r) + s,   s' = z - C(z)          (where a server compresses what it sends back)

What ranks received, times D, plus all that is kept is all that was given and kept before:

    D·C(z) + D·s' + Σ_r e_r' = Σ_r x_r + D·s + Σ_r e_r

up to one fp32 rounding for each operation. A reduction *prepares* e' and s' (it holds c and the bytes that it sent, and
computes nothing); the step *commits* them; a step that is skipped *rolls back*, and e and s are what they were.

At another number of ranks the servers take over what is owed: s ← s + Σ_r e_r / D, e_r ← 0 (:func:`fold`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zoo.comm.compression.codec import Codec

Tensor = torch.Tensor
Piece = tuple[slice, Tensor]
"""Where elements lie, and the bytes that stand for them."""


@dataclass
class Error:
    """One error with what the next commit makes of it.

    Attributes:
        value: fp32, (n,), or None for zero.
    """

    codec: Codec
    value: Tensor | None = None
    _given: Tensor | None = None
    _sent: Sequence[Piece] = ()

    def encode(self, c: Tensor, pieces: Sequence[Piece]) -> None:
        """c ← c + error, and its bytes into the pieces. ``c`` belongs to the error until commit or roll-back.

        Where reductions follow each other before a step, each adds what the one before left out.
        """
        before = self._prepare() if self._given is not None else self.value
        for where, wire in pieces:
            self.codec.encode_(c[where], None if before is None else before[where], wire)
        self._given, self._sent = c, pieces

    def _prepare(self) -> Tensor:
        if self._given is None:
            raise AssertionError("nothing was sent")
        for where, wire in self._sent:
            self.codec.owed_(self._given[where], self._given[where], wire)
        return self._given

    def commit(self) -> None:
        """What was sent counts: the error is what it left out. Elements that no piece has keep theirs: all of c."""
        if self._given is None:
            return
        if self.value is None:
            self.value = torch.zeros_like(self._given)
        for where, wire in self._sent:
            self.codec.owed_(self.value[where], self._given[where], wire)
        self._given, self._sent = None, ()

    def roll_back(self) -> None:
        """What was sent does not count."""
        self._given, self._sent = None, ()


def fold(workers: Sequence[Tensor | None], server: Tensor | None) -> Tensor | None:
    """s + Σ_r e_r / D: what the servers owe when all workers begin at zero, (n,) fp32; None for nothing.

    Args:
        workers: e_r of each of the D ranks, (n,) each, None for zero.
        server: s of all chunks, (n,), or None for zero.
    """
    errors = [error for error in workers if error is not None]
    if not errors:
        return None if server is None else server.clone()
    total = torch.zeros_like(errors[0])
    for error in errors:
        total += error
    total *= 1.0 / len(workers)
    return total if server is None else total.add_(server)


@dataclass
class Owed:
    """An error of a collective that computes it at once, from what all ranks sent together.

    Attributes:
        value: fp32, (n,), or None for zero.
    """

    value: Tensor | None = None
    _next: Tensor | None = None

    def add_to(self, c: Tensor) -> None:
        """c ← c + error, with what reductions since the last commit left out."""
        before = self._next if self._next is not None else self.value
        if before is not None:
            c.add_(before)

    def prepare(self, left: Tensor) -> None:
        """What the reduction leaves out."""
        self._next = left

    def commit(self) -> None:
        """What was sent counts."""
        if self._next is not None:
            self.value, self._next = self._next, None

    def roll_back(self) -> None:
        """What was sent does not count."""
        self._next = None
