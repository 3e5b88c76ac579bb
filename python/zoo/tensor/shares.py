"""What each rank of the axis ``tensor`` gets of heads, of the vocabulary and of hidden features: integers alone.

Legend: t the degree, the ranks along the axis; H query heads, K heads of keys and values, H / K queries to each
(grouped-query attention, Ainslie et al. 2023, section 2.2): query h reads the keys and values k = h // (H / K).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

HEAD, KV, QUERY = "head", "kv", "query"
"""Names of dims that are dealt together: query heads, heads of keys and values, and the queries of one of these."""
Run = tuple[int, int]


def deal(number: int, degree: int, rank: int, grain: int = 1) -> Run:
    """[start, stop) of a rank's share of ``number`` things, in multiples of ``grain``; they differ by one at most.

    Raises:
        ValueError: the grain does not divide the number, or there are fewer grains than ranks.
    """
    if grain < 1 or number % grain:
        raise ValueError(f"{number} cannot be dealt in multiples of {grain}: they do not divide it.")
    grains = number // grain
    if grains < degree:
        raise ValueError(
            f"{number} in multiples of {grain} are {grains} shares, too few for {degree} tensor-parallel ranks; the "
            f"degree is at most {grains}."
        )
    each, more = divmod(grains, degree)
    start = rank * each + min(rank, more)
    return start * grain, (start + each + (rank < more)) * grain


@dataclass(frozen=True)
class Heads:
    """The query heads of one rank, and which keys and values they read.

    Query heads are dealt as evenly as integers allow; a rank takes the keys and values that its queries need, which
    others may need too. Models expect equally many queries of each head of keys and values, so these are repeated
    where a rank has them of some more than of others: nine queries of three at degree 2 make the groups (0,), (1,),
    (2,), (3,), (4,) with keys 0, 0, 0, 1, 1 on rank 0.

    Attributes:
        num: H. num_kv: K. degree: t. rank: its place.
    """

    num: int
    num_kv: int
    degree: int
    rank: int

    @cached_property
    def queries(self) -> range:
        """This rank's."""
        return range(*deal(self.num, self.degree, self.rank))

    @cached_property
    def groups(self) -> tuple[tuple[int, range], ...]:
        """(k, the queries that read it), equally many each; one k may be there several times."""
        each = self.num // self.num_kv
        found: list[range] = []
        for query in self.queries:
            if found and query // each == found[-1].start // each:
                found[-1] = range(found[-1].start, query + 1)
            else:
                found.append(range(query, query + 1))
        length = gcd(*map(len, found))
        return tuple(
            (start // each, range(start, start + length))
            for queries in found
            for start in range(queries.start, queries.stop, length)
        )


@dataclass(frozen=True)
class Share:
    """What one rank has of every named dim that is cut.

    Args:
        sizes: of named dims of the whole model. degree, rank: of the axis ``tensor``.
        grain: hidden features and the vocabulary are dealt in multiples of this.
    """

    sizes: tuple[tuple[str, int], ...]
    degree: int
    rank: int
    grain: int = 1

    @cached_property
    def known(self) -> dict[str, int]:
        """Sizes by name."""
        return dict(self.sizes)

    @cached_property
    def heads(self) -> Heads:
        """Of attention."""
        num = self.known[HEAD]
        return Heads(num, self.known.get(KV, num), self.degree, self.rank)

    def of(self, name: str, size: int) -> Run:
        """[start, stop) of a dim that is no heads."""
        try:
            return deal(size, self.degree, self.rank, self.grain)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None

    def size(self, name: str) -> int | None:
        """How many this rank has of a cut dim; None where its size is not known to the plan."""
        if name in (HEAD, KV, QUERY):
            groups = self.heads.groups
            return {HEAD: len(self.heads.queries), KV: len(groups), QUERY: len(groups[0][1])}[name]
        if name not in self.known:
            return None
        start, stop = self.of(name, self.known[name])
        return stop - start
