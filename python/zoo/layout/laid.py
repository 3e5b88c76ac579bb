"""A part of a tensor that is several boxes of it, side by side: fused queries, keys and values, gates and inputs.

A tensor-parallel rank of a fused projection has the queries of its heads, their keys and their values as one parameter.
In the whole tensor they are three boxes, far apart; in the parameter they lie one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zoo.layout.boxes import Box


@dataclass(frozen=True)
class Laid:
    """One of the boxes of a part: ``box`` of the whole tensor begins at index ``place`` of the part."""

    place: tuple[int, ...]
    box: Box

    @property
    def here(self) -> Box:
        """Where it is in the part."""
        return Box(self.place, self.box.sizes)

    def within(self, here: Box) -> Box:
        """What of the whole tensor ``here``, a box of the part inside of :attr:`here`, is."""
        moved = zip(here.offsets, self.place, self.box.offsets, strict=True)
        return Box(tuple(x - place + offset for x, place, offset in moved), here.sizes)

    def here_of(self, box: Box) -> Box:
        """Where in the part ``box`` is, a box of the whole tensor inside of :attr:`box`."""
        moved = zip(box.offsets, self.box.offsets, self.place, strict=True)
        return Box(tuple(x - offset + place for x, offset, place in moved), box.sizes)


@dataclass(frozen=True)
class Boxes:
    """What a rank's parameter is of a tensor, where that is several boxes. ``sizes`` are the parameter's.

    Boxes may have elements of the whole tensor in common (a key that two groups of queries share is there twice); in
    the part they do not overlap, and leave nothing out.

    Raises:
        ValueError: they do not tile the part.
    """

    sizes: tuple[int, ...]
    laid: tuple[Laid, ...]

    def __post_init__(self) -> None:
        from zoo.layout.tiling import tiles

        here = [laid.here for laid in self.laid if len(laid.place) == len(laid.box.sizes) == len(self.sizes)]
        fits = len(here) == len(self.laid) and all(box.fits(self.sizes) for box in here)
        if not fits or not tiles(here, self.sizes):
            shown = "; ".join(f"{laid.box} at {laid.place}" for laid in self.laid)
            raise ValueError(
                f"a part of shape {self.sizes} got {shown or 'no box'}; its boxes have to be side by side in it, each "
                "element of the part in exactly one of them."
            )

    @classmethod
    def side_by_side(cls, boxes: Iterable[Box], dim: int = 0) -> Boxes:
        """Boxes one after the other along ``dim``, with the same sizes in every other dim."""
        given = list(boxes)
        if not given or not 0 <= dim < len(given[0].sizes):
            raise ValueError(f"side_by_side got {len(given)} boxes and dim={dim}; it takes at least one, and its dim.")
        laid, end = [], 0
        for box in given:
            laid.append(Laid(tuple(end if i == dim else 0 for i in range(len(box.sizes))), box))
            end += box.sizes[dim]
        first = given[0].sizes
        return cls((*first[:dim], end, *first[dim + 1 :]), tuple(laid))

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return math.prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether all of them are boxes of a tensor of this shape."""
        return all(laid.box.fits(shape) for laid in self.laid)

    def run(self, start: int, stop: int) -> list[Box]:
        """The boxes of the whole tensor that the run [start, stop) of the part's row-major order is, in its order.

        The elements of each are consecutive in the part. Boxes that are side by side along the first dim cost what one
        box each costs (:meth:`Box.run`); along another dim each row of the part is cut.

        Raises:
            ValueError: it is no run of the part.
        """
        found: list[Box] = []
        for slab in Box.whole(self.sizes).run(start, stop):
            found += self._cut(slab, 0, self.laid)
        return found

    def _cut(self, slab: Box, dim: int, among: Sequence[Laid]) -> Iterator[Box]:
        """``slab``: a box of the part that is one run, and has size 1 in all dims before ``dim``."""
        there = [(laid, common) for laid in among if (common := slab.intersection(laid.here)) is not None]
        if len(there) == 1:
            yield there[0][0].within(slab)
            return
        low, high = slab.offsets[dim], slab.stops[dim]
        among = [laid for laid, _ in there]
        bounds = {bound for _, common in there for bound in (common.offsets[dim], common.stops[dim])}
        edges = sorted({low, high, *bounds})
        if len(edges) == 2:  # they differ in later dims: each row is cut
            edges = list(range(low, high + 1))
        for first, last in itertools.pairwise(edges):
            part = Box(
                (*slab.offsets[:dim], first, *slab.offsets[dim + 1 :]),
                (*slab.sizes[:dim], last - first, *slab.sizes[dim + 1 :]),
            )
            yield from self._cut(part, dim + (last - first == 1), among)


Part = Box | Boxes
"""Of a tensor, on one rank."""


def boxes_of(part: Part) -> tuple[Laid, ...]:
    """The boxes that a part is, each with its place in the part."""
    return part.laid if isinstance(part, Boxes) else (Laid((0,) * len(part.sizes), part),)
