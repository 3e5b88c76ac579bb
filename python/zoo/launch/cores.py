"""Cores of the ranks of a node: each has its own, side by side."""

from __future__ import annotations

from collections.abc import Collection

from zoo.launch.hosts import is_number

_MOST = 65_536
"""Cores of a host; more are a slip of the pen."""


def parse_cores(text: str) -> list[int]:
    """``"0-3,8"`` → ``[0, 1, 2, 3, 8]``.

    Raises:
        ValueError: it is written otherwise, does not rise, or names a core twice.
    """
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not is_number(low) or (dash and not is_number(high)):
            raise ValueError(f"{text!r} is no list of cores; write such as 0-3,8.")
        begin, end = int(low), int(high or low)
        if end < begin or (found and begin <= found[-1]):
            raise ValueError(f"{text!r} is no list of cores that rises; write such as 0-3,8, each core once.")
        if end >= _MOST:
            raise ValueError(f"{text!r} has the core {end}; {_MOST - 1} is the highest.")
        found += range(begin, end + 1)
    return found


def bind(ranks: int, there: Collection[int], wanted: str | None = None) -> list[list[int]]:
    """The cores of each local rank: ``n // ranks`` of the n cores, in their order; what does not come out even is idle.

    Args:
        ranks: processes on this host, 1 or more.
        there: cores that this process may use, ``os.sched_getaffinity(0)``.
        wanted: only these, as :func:`parse_cores` reads them; None: all.

    Raises:
        ValueError: cores that are not there, or fewer than ranks.
    """
    cores = sorted(there) if wanted is None else parse_cores(wanted)
    missing = [core for core in cores if core not in there]
    if missing:
        raise ValueError(f"cores {missing} are not there; this process may use {sorted(there)}.")
    each = len(cores) // ranks
    if each == 0:
        raise ValueError(f"{ranks} ranks cannot have cores of their own out of {len(cores)}: {cores}.")
    return [cores[rank * each : (rank + 1) * each] for rank in range(ranks)]
