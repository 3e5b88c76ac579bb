"""How rows of a matrix are heads, parts and groups: named dims in order, the slowest first.

* ``head dim``: the rows of a query projection, head by head.
* ``part=3 head dim``: first all queries, then all keys, then all values (GPT-2).
* ``head part=3 dim``: query, key and value of each head together (BLOOM, GPT-NeoX).
* ``(head kv kv) dim``: queries, keys, values, of which there may be fewer (Phi-3).
* ``kv (query one=1 one=1) dim``: the queries of a group, their key and their value (Falcon).

A dim is written with its size, or is a name whose size the plan knows; one name without either gets what is left.
Names in brackets are laid one after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zoo.tensor.shares import HEAD, KV, QUERY, Run, Share

_WORD = re.compile(r"\(([^()]*)\)|([^\s()]+)|(\S)")
_DIM = re.compile(r"([A-Za-z_]\w*)(?:=(\d+))?")
HEADS = frozenset({HEAD, KV, QUERY})
"""Dealt together, whichever of them a rule names."""


@dataclass(frozen=True)
class Dim:
    """A named dim; ``size`` None: the plan knows it, or it is what is left."""

    name: str
    size: int | None = None

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}={self.size}"


@dataclass(frozen=True)
class Dims:
    """Dims in order; a tuple among them is dims one after the other."""

    factors: tuple[Dim | tuple[Dim, ...], ...]
    text: str = field(compare=False, default="")

    def __str__(self) -> str:
        return " ".join(str(f) if isinstance(f, Dim) else f"({' '.join(map(str, f))})" for f in self.factors)

    @property
    def total(self) -> int:
        """The number of rows, where all sizes are known."""
        return math.prod(map(_size, self.factors))

    @classmethod
    def parse(cls, text: str) -> Dims:
        """Raises ValueError for what is no list of dims."""
        found: list[Dim | tuple[Dim, ...]] = []
        for match in _WORD.finditer(text):
            together, single, other = match.groups()
            if other is not None or (together is not None and not together.split()):
                raise ValueError(f"dims {text!r}: {match.group()!r}; brackets hold names, in pairs and one level deep.")
            found.append(_dim(single, text) if single else tuple(_dim(word, text) for word in together.split()))
        if not found:
            raise ValueError("dims '': name at least one, such as 'head dim'.")
        return cls(tuple(found), text)

    def resolved(self, sizes: dict[str, int], total: int, of: str) -> Dims:
        """The same with all sizes, whose product is ``total``; ``of`` names what has them.

        Raises:
            ValueError: they cannot be.
        """
        known = {QUERY: sizes[HEAD] // sizes.get(KV, sizes[HEAD])} if HEAD in sizes else {}
        known |= {KV: sizes[HEAD]} if HEAD in sizes and KV not in sizes else {}
        known |= sizes

        def sized(dim: Dim) -> Dim:
            return Dim(dim.name, known.get(dim.name) if dim.size is None else dim.size)

        factors = [sized(f) if isinstance(f, Dim) else tuple(map(sized, f)) for f in self.factors]
        single = [f for f in factors if isinstance(f, Dim) and f.size is None]
        unknown = [d.name for f in factors if isinstance(f, tuple) for d in f if d.size is None]
        rest = math.prod(_size(f) for f in factors if f not in single) if not unknown else 0
        if unknown or len(single) > 1 or not rest or total % rest or (not single and rest != total):
            names = [dim.name for dim in single] + unknown
            raise ValueError(
                f"{of} has {total} features, and {self.text!r} "
                + (f"has no size for {', '.join(names)}" if len(names) > 1 or unknown
                   else f"makes multiples of {rest}" if single else f"makes {rest}")
                + f" with {', '.join(f'{k}={v}' for k, v in sorted(known.items()))}."
            )  # fmt: skip
        return Dims(
            tuple(Dim(f.name, total // rest) if isinstance(f, Dim) and f.size is None else f for f in factors),
            self.text,
        )

    def runs(self, cut: str, share: Share) -> list[Run]:
        """What of the rows a rank's model sees, in its order, as [start, stop); one row may be there several times.

        Args:
            cut: the name of the dim that is dealt; "head", "kv" and "query" go together.
        """
        found: list[Run] = []
        for start, stop in self._runs(0, 0, HEADS if cut in HEADS else frozenset({cut}), share, None):
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
        return found

    def _runs(
        self, at: int, base: int, cut: frozenset[str], share: Share, queries: range | None
    ) -> Iterator[Run]:  # fmt: skip
        """``base``: the number of the row that the dims before ``at`` have chosen, in units of what follows them."""
        rest = self.factors[at:]
        if not any(dim.name in cut for factor in rest for dim in _each(factor)):
            size = math.prod(map(_size, rest))
            yield base * size, (base + 1) * size
            return
        first = rest[0]
        base *= _size(first)
        for dim in _each(first):
            if dim.name not in cut:
                within = [(index, queries) for index in range(_sized(dim))]
            elif dim.name == KV:
                within = list(share.heads.groups)
            elif dim.name == QUERY:
                mine = queries or range(0)
                within = [(query % _sized(dim), queries) for query in mine]
            elif dim.name == HEAD:
                within = [(query, queries) for _, group in share.heads.groups for query in group]
            else:
                start, stop = share.of(dim.name, _sized(dim))
                within = [(index, queries) for index in range(start, stop)]
            if not any(other.name in cut for factor in rest[1:] for other in _each(factor)):
                size = math.prod(map(_size, rest[1:]))
                yield from (((base + index) * size, (base + index + 1) * size) for index, _ in within)
            else:
                for index, group in within:
                    yield from self._runs(at + 1, base + index, cut, share, group)
            base += _sized(dim) if isinstance(first, tuple) else 0


def stored(runs: Sequence[Run]) -> tuple[list[Run], list[Run] | None]:
    """The rows that are needed, each once and in order; and where in them ``runs`` are, None for just those."""
    found: list[Run] = []
    for start, stop in sorted(runs):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    if found == list(runs):
        return found, None
    take = []
    for start, stop in runs:
        before = sum(min(high, start) - low for low, high in found if low < start)
        take.append((before, before + stop - start))
    return found, take


def _dim(word: str, text: str) -> Dim:
    match = _DIM.fullmatch(word)
    if match is None or match.group(2) == "0":
        raise ValueError(f"dims {text!r}: {word!r}; a dim is a name, or a name with its size: part=3.")
    return Dim(match.group(1), int(match.group(2)) if match.group(2) else None)


def _each(factor: Dim | tuple[Dim, ...]) -> tuple[Dim, ...]:
    return (factor,) if isinstance(factor, Dim) else factor


def _sized(dim: Dim) -> int:
    if dim.size is None:
        raise AssertionError(f"dim {dim.name!r} has no size: Dims.resolved() comes first.")
    return dim.size


def _size(factor: Dim | tuple[Dim, ...]) -> int:
    return sum(map(_sized, _each(factor)))
