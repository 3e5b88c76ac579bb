"""What a lossy collective leaves out: kept, prepared, committed or rolled back; and handed over to other ranks.

Legend: D ranks, n elements, m those of a rank's chunk; x_r what rank r gives, e_r its *worker error*, s its chunk of
the *server error*, C the codec.

    c_r = x_r + e_r,         e_r' = c_r - C(c_r)
    z   = 1/D Σ_r C(c_r) + s,   s' = z - C(z)          (where a server compresses what it sends back)

What ranks received, times D, plus all that is kept is all that was given and kept before:

    D·C(z) + D·s' + Σ_r e_r' = Σ_r x_r + D·s + Σ_r e_r

up to one fp32 rounding for each operation. A reduction *prepares* e' and s' (it holds c and the bytes that it sent, and
computes nothing); the step *commits* them, which costs nothing either; a step that is skipped *rolls back*, and e and s
are what they were.

At another number of ranks the servers take over what is owed: s ← s + Σ_r e_r / D, e_r ← 0 (:func:`fold`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zoo.comm.compression.codec import Codec

Tensor = torch.Tensor
Piece = tuple[slice, Tensor]
"""Where elements lie, and the bytes that stand for them."""


class Error:
    """One error, what is sent now, and what the next commit makes of it.

    After a commit it may still be c and the bytes that stand for it: the next reduction takes what is owed on its way,
    in one pass where the codec can. It holds two tensors of (n,) fp32, which take turns.
    """

    def __init__(self, codec: Codec, value: Tensor | None = None) -> None:
        self.codec = codec
        self._kept = value
        self._kept_sent: Sequence[Piece] = ()  # what stands for _kept where that is c
        self._given: Tensor | None = None  # c of the reductions since the last commit
        self._given_sent: Sequence[Piece] = ()
        self._spare: Tensor | None = None

    @property
    def value(self) -> Tensor | None:
        """(n,) fp32, or None for zero."""
        if self._kept is not None:
            self._settle(self._kept, self._kept_sent)
            self._kept_sent = ()
        return self._kept

    @value.setter
    def value(self, value: Tensor | None) -> None:
        self._kept, self._kept_sent = value, ()

    def _settle(self, c: Tensor, sent: Sequence[Piece]) -> None:
        for where, wire in sent:
            self.codec.owed_(c[where], c[where], wire)

    def encode(self, x: Tensor, pieces: Sequence[Piece]) -> None:
        """c = x + error, and its bytes into the pieces, which cover it. ``x`` (n,) does not change.

        Where reductions follow each other before a step, each adds what the one before left out.
        """

        def encode(c: Tensor, where: slice, error: Tensor | None, last: Tensor | None, wire: Tensor) -> None:
            self.codec.encode_sum_(c, x[where], error, last, wire)

        self._encode(encode, x.numel(), x.device, pieces)

    def encode_mean(self, wires: Tensor, numel: int, wire: Tensor) -> None:
        """The same with the mean, (n,), of what the rows of ``wires`` (D, w) stand for, in one piece."""

        def encode(c: Tensor, where: slice, error: Tensor | None, last: Tensor | None, wire: Tensor) -> None:
            self.codec.encode_mean_(c, wires, error, last, wire)

        self._encode(encode, numel, wires.device, [(slice(0, numel), wire)])

    def _encode(self, encode: Any, numel: int, device: torch.device, pieces: Sequence[Piece]) -> None:
        before, sent, c = self._kept, self._kept_sent, self._spare
        if self._given is not None:
            before, sent, c = self._given, self._given_sent, self._given
        else:
            self._spare = None
        if before is not None and not (self.codec.one_pass and _wheres(sent) == _wheres(pieces)):
            self._settle(before, sent)
            if before is self._kept:
                self._kept_sent = ()
            sent = ()
        if c is None or c.numel() != numel or c.device != device:
            c = torch.empty(numel, dtype=torch.float32, device=device)
        for place, (where, wire) in enumerate(pieces):
            error = None if before is None else before[where]
            encode(c[where], where, error, sent[place][1] if sent else None, wire)
        self._given, self._given_sent = c, pieces

    def memory_bytes(self) -> int:
        """Bytes held now, the spare tensor among them."""
        held = {id(t): t for t in (self._kept, self._given, self._spare) if t is not None}
        return sum(t.nbytes for t in held.values())

    def commit(self) -> None:
        """What was sent counts: the error is what it left out."""
        if self._given is None:
            return
        self._spare = self._kept
        self._kept, self._kept_sent = self._given, self._given_sent
        self._given, self._given_sent = None, ()

    def roll_back(self) -> None:
        """What was sent does not count."""
        if self._given is not None:
            self._spare = self._given
        self._given, self._given_sent = None, ()


def _wheres(pieces: Sequence[Piece]) -> list[slice]:
    return [where for where, _ in pieces]


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


class Owed:
    """An error of a collective that computes it at once, from what all ranks sent together. Two tensors take turns."""

    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value
        """fp32, (n,), or None for zero."""
        self._next: Tensor | None = None
        self._spare: Tensor | None = None

    def added(self, x: Tensor) -> Tensor:
        """c = x + error, with what reductions since the last commit left out: (n,) fp32, which :meth:`prepare` takes.

        ``x`` does not change.
        """
        c, before = (self._next, self._next) if self._next is not None else (self._spare, self.value)
        if c is None or c.shape != x.shape or c.device != x.device:
            c = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        self._spare = self._next = None
        return c.copy_(x) if before is None else torch.add(x, before, out=c)

    def prepare(self, left: Tensor) -> None:
        """What the reduction leaves out."""
        self._next = left

    def memory_bytes(self) -> int:
        """Bytes held now, the spare tensor among them."""
        held = {id(t): t for t in (self.value, self._next, self._spare) if t is not None}
        return sum(t.nbytes for t in held.values())

    def commit(self) -> None:
        """What was sent counts."""
        if self._next is not None:
            self.value, self._next, self._spare = self._next, None, self.value

    def roll_back(self) -> None:
        """What was sent does not count."""
        if self._next is not None:
            self._next, self._spare = None, self._next
