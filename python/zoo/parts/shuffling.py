"""Random numbers from counters: the same on every rank, Python and torch, with nothing to save.

Loaders of parts and of the engine shuffle alike by it, so that a part that restricts nothing changes nothing.
"""

from __future__ import annotations

_ROUNDS = 6
_MASK = (1 << 64) - 1


def shuffled(index: int, size: int, seed: int) -> int:
    """Where a shuffle of ``size`` elements puts ``index``: a permutation of 0..size-1, without storing it.

    A Feistel network over the smallest even number of bits that holds ``size``; results outside are sent through it
    again until one falls inside (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains",
    section 5). Depends on the arguments only, so it is the same on every rank, Python and torch.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for number in range(_ROUNDS):
            left, right = right, left ^ (mixed(right + (number << 56), seed) & low)
        index = (left << half) | right
        if index < size:
            return index


def mixed(value: int, seed: int) -> int:
    """64 bits that look random, of two integers: the finaliser of splitmix64."""
    z = (value + (seed + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def drawn(seed: int, *counters: int) -> int:
    """64 bits that look random, of a seed and any number of counters, such as step, micro-batch and layer."""
    found = mixed(len(counters), seed)
    for counter in counters:
        found = mixed(counter, found)
    return found


def uniform(seed: int, *counters: int) -> float:
    """A number in [0, 1) of a seed and counters, from the upper 53 bits of :func:`drawn`."""
    return (drawn(seed, *counters) >> 11) * 2.0**-53
