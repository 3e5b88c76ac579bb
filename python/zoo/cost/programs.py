"""From what a rank does (:mod:`zoo.plan`) to what its time is asked of (:mod:`zoo.cost.events`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from zoo.cost.events import Compute, Program, Start, Wait
from zoo.cost.hardware import Device
from zoo.cost.products import pass_s
from zoo.plan import Action, Actions, Collective, Kind

__all__ = ["program_of", "seconds_on"]


def program_of(
    actions: Actions, *, seconds: Callable[[Action], float], members: Callable[[Collective], tuple[int, ...]]
) -> Program:
    """The program of one rank: its computations, what it begins in order, and where it waits.

    Collectives of the same ranks are one stream, in whose order all of them begin. What a step publishes is waited for
    at its end. Of a collective in two stages both begin where the first does.

    Args:
        actions: planned or recorded, with computations. seconds: of a computation.
        members: the ranks of a collective of this rank, this one among them. For the equal lists of ranks that are one
            group that is all of them.
    """
    found: list[Compute | Start | Wait] = []
    begun: dict[tuple[Kind, int], list[Any]] = {}  # by kind and bucket, what nobody has waited for
    numbers: Counter[tuple[int, ...]] = Counter()
    for action in actions:
        if action.kind is Kind.COMPUTE:
            found.append(Compute(seconds(action), action.unit or action.moment.value))
            continue
        keys = []
        for collective in action.collectives:
            if collective.size > 1:
                ranks = members(collective)
                key = ranks, numbers[ranks]
                numbers[ranks] += 1
                keys.append(key)
                part = collective.size if collective.op == "all_gather" else 1
                num_bytes = collective.num_bytes / part  # what one rank gives
                found.append(Start(key, ranks, str(ranks), collective.op, num_bytes, action.verb))
        kind = Kind.UNSHARD if action.kind is Kind.PREFETCH else action.kind
        if kind is Kind.WAIT and action.of is not None:
            keys = begun.pop((action.of, action.bucket), []) + keys
        if kind in (Kind.WAIT, Kind.VOTE):
            found += [Wait(tuple(keys))] * bool(keys)
        elif keys:
            begun.setdefault((kind, action.bucket), []).extend(keys)
    rest = [key for keys in begun.values() for key in keys]
    return [*found, *([Wait(tuple(rest))] if rest else [])]


def seconds_on(device: Device, dtype: str = "bf16") -> Callable[[Action], float]:
    """How long a computation takes, by the roofline: the longer of its FLOPs at the rate that large products reach, and
    of its bytes at the rate of memory (Williams, Waterman and Patterson 2009, "Roofline")."""
    rate = device.peak(dtype) * device.reached

    def seconds(action: Action) -> float:
        return max(action.flops / rate, pass_s(device, action.num_bytes))

    return seconds
