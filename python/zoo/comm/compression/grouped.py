"""Codecs that write few bits for each element and some numbers for each group of consecutive ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch

from zoo.comm.compression.codec import Codec, whole_words

Tensor = torch.Tensor
Part = tuple[slice, "list[Tensor]"]
"""Where elements lie, and the parts of a wire that stand for them."""
BLOCK = 65536
"""Elements of a block: a few tensors of it stay in a core's cache, and the work on one is long against a call."""


class Grouped(Codec):
    """Wire: fp32 numbers of the groups, one kind after the other, then the elements, in whole words.

    A subclass has ``_quantise`` and ``_dequantise``, which work on whole groups. Everything goes block by block, so
    that no temporary is as long as a chunk, and sums, what is owed and the bytes cost one pass over memory.

    Args:
        bits: of an element, 8 or 4.
        group_size: elements of a group; even with 4 bits.
        num_of_group: how many fp32 numbers a group has.
        dtype: of the elements on the wire.
    """

    one_pass: ClassVar[bool] = True

    def __init__(self, *, bits: int, group_size: int, num_of_group: int, dtype: torch.dtype) -> None:
        self._bits, self._group_size, self._num, self._dtype = bits, group_size, num_of_group, dtype

    def _quantise(self, c: Tensor) -> tuple[Tensor, ...]:
        """The elements, then the numbers of groups, as they are on the wire."""
        raise NotImplementedError

    def _dequantise(self, out: Tensor, *parts: Tensor) -> None:
        """``out`` ← what the parts stand for."""
        raise NotImplementedError

    def wire_bytes(self, numel: int) -> int:
        """See :class:`Codec`: 4·ceil(n/group) for each number of a group + ceil(n·bits/8), in whole words."""
        return 4 * self._num * -(-numel // self._group_size) + whole_words(-(-numel * self._bits // 8))

    def _blocks(self, wire: Tensor, numel: int) -> Iterator[Part]:
        groups, size = -(-numel // self._group_size), self._group_size
        head = 4 * self._num * groups
        of_groups = wire[:head].view(torch.float32).view(self._num, groups)
        elements = wire[head : head - (-numel * self._bits // 8)].view(self._dtype)
        step = size * max(1, BLOCK // size)
        for begin in range(0, numel, step):
            end = min(begin + step, numel)
            of_block = elements[begin * self._bits // 8 : -(-end * self._bits // 8)]
            yield slice(begin, end), [of_block, *(part[begin // size : -(-end // size)] for part in of_groups)]

    def _room(self, like: Tensor) -> Tensor:
        return torch.empty_like(like[: max(BLOCK, self._group_size)])

    def encode_(self, c: Tensor, error: Tensor | None, wire: Tensor) -> None:
        """See :class:`Codec`."""
        self.encode_sum_(c, c, error, None, wire)

    def encode_sum_(self, c: Tensor, x: Tensor, error: Tensor | None, last: Tensor | None, wire: Tensor) -> None:
        """See :class:`Codec`."""
        self._encode(c, lambda where, _: x[where], error, last, wire)

    def encode_mean_(self, c: Tensor, wires: Tensor, error: Tensor | None, last: Tensor | None, wire: Tensor) -> None:
        """See :class:`Codec`."""
        means, room = self._means(c, wires), self._room(c)

        def mean(where: slice, size: int) -> Tensor:
            next(means)(room[:size])
            return room[:size]

        self._encode(c, mean, error, last, wire)

    def _encode(
        self, c: Tensor, given: Callable[[slice, int], Tensor], error: Tensor | None, last: Tensor | None, wire: Tensor
    ) -> None:
        room, before = self._room(c), None if last is None else self._blocks(last, c.numel())
        for where, parts in self._blocks(wire, c.numel()):
            to = c[where]
            x, e = given(where, to.numel()), None if error is None else error[where]
            if before is not None and e is not None:
                seen = room[: to.numel()]
                self._dequantise(seen, *next(before)[1])
                e = torch.sub(e, seen, out=seen)
            if e is None:
                to.copy_(x)
            else:
                torch.add(x, e, out=to)
            for part, value in zip(parts, self._quantise(to), strict=True):
                part.copy_(value)

    def mean_(self, out: Tensor, wires: Tensor) -> None:
        """See :class:`Codec`."""
        for mean, (where, _) in zip(self._means(out, wires), self._blocks(wires[0], out.numel()), strict=True):
            mean(out[where])

    def _means(self, like: Tensor, wires: Tensor) -> Iterator[Callable[[Tensor], None]]:
        """For each block what writes its mean somewhere."""
        room = self._room(like)
        for ranks in zip(*(self._blocks(wire, like.numel()) for wire in wires), strict=True):

            def mean(out: Tensor, ranks: tuple[Part, ...] = ranks) -> None:
                for rank, (_, parts) in enumerate(ranks):
                    self._dequantise(room[: out.numel()] if rank else out, *parts)
                    if rank:
                        out.add_(room[: out.numel()])
                out.mul_(1.0 / len(ranks))

            yield mean

    def decode_(self, out: Tensor, wire: Tensor, *, add: bool = False) -> None:
        """See :class:`Codec`."""
        room = self._room(out) if add else out
        for where, parts in self._blocks(wire, out.numel()):
            to = out[where]
            self._dequantise(room[: to.numel()] if add else to, *parts)
            if add:
                to.add_(room[: to.numel()])

    def owed_(self, error: Tensor, c: Tensor, wire: Tensor) -> None:
        """See :class:`Codec`."""
        room = self._room(c)
        for where, parts in self._blocks(wire, c.numel()):
            seen = room[: where.stop - where.start]
            self._dequantise(seen, *parts)
            torch.sub(c[where], seen, out=error[where])
