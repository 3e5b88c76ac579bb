"""Whether boxes are a tensor, cut up."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from zoo.layout.boxes import Box

PRIME = 2**61 - 1


def tiles(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether every element of a tensor is in exactly one of some boxes of it; n boxes of d dims take O(n d).

    The coordinates c of each dim get random values P(c) modulo a prime. The sum over all boxes of the products over
    dims of P(stop) - P(offset) is a polynomial in the measures of the cells between coordinates, and the same
    polynomial as that of the whole tensor if and only if each cell is in one box. Different ones agree at a random
    point with a probability of at most d / 2^61 (Schwartz 1980, "Fast probabilistic algorithms for verification of
    polynomial identities", lemma 1).
    """
    values: list[dict[int, int]] = [{} for _ in shape]

    def measure(box: Box) -> int:
        product = 1
        for known, low, high in zip(values, box.offsets, box.stops, strict=True):
            for coordinate in (low, high):
                if coordinate not in known:
                    known[coordinate] = secrets.randbelow(PRIME)
            product = product * (known[high] - known[low]) % PRIME
        return product

    return sum(map(measure, boxes)) % PRIME == measure(Box.whole(shape))
