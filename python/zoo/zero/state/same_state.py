"""Whether all ranks were given one state: what several of them hold has the same bits, and all is of one moment.

At stage 0 models would differ for ever, and above it each shard would come from another state: nothing later tells.
What only one rank holds, nothing can be compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zoo.shard.agreement import listed, short_digest
from zoo.shard.values.writes import digest_of

if TYPE_CHECKING:
    from zoo.zero.inspection import Inspection

_HOW = (
    "Nothing was loaded. Every rank gives what it has of one state: files of one save, or of whole tensors one file on "
    "all of them."
)


def told_of(value: Any) -> str:
    """What stands for a tensor, or a number: type, shape and a checksum of the bytes."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} {int(digest_of(value)):012x}"


def refuse_others(optimizer: Inspection, told: Mapping[str, str], moment: int | None = None) -> None:
    """Raise ValueError, on all ranks, unless those that train one model were given one state. Collective.

    Args:
        told: by what this rank was given, as "exp_avg of first.weight", :func:`told_of` its value. Ranks that repeat a
            state have the same keys.
        moment: how many updates had been made when it was got; None if that is not known.
    """
    everyone, replicas = optimizer.sharded.everyone, tuple(optimizer.comm.ranks)
    if everyone.size == 1:
        return
    digest = short_digest(sorted(told.items()))
    every = everyone.all_gather_object((replicas, moment, digest))
    # Ranks with other layers, or other parts along mesh axes, are of other groups.
    groups = {group: [rank for rank, (of, _, _) in enumerate(every) if of == group] for group, _, _ in every}
    for ranks in groups.values():
        moments = [every[rank][1] for rank in ranks]
        if len(set(moments)) > 1:
            others = [rank for rank, found in zip(ranks, moments, strict=True) if found != moments[0]]
            raise ValueError(
                f"loading a state_dict failed: {listed(others)} gave a state of another moment than rank {ranks[0]}: "
                f"after {' and '.join(_updates(n) for n in dict.fromkeys(moments))}. {_HOW}"
            )
    if all(len({every[rank][2] for rank in ranks}) == 1 for ranks in groups.values()):
        return
    states: list[Mapping[str, str]] = everyone.all_gather_object(dict(told))
    for ranks in groups.values():
        _compare(ranks, [states[rank] for rank in ranks])


def _compare(ranks: Sequence[int], states: Sequence[Mapping[str, str]]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for rank, state in zip(ranks, states, strict=True):
        for key, value in state.items():
            first.setdefault(key, (rank, value))
    names = sorted({key for state in states for key, value in state.items() if value != first[key][1]})
    if not names:
        return
    shown, (at, value) = names[0], first[names[0]]
    others = [r for r, state in zip(ranks, states, strict=True) if state.get(shown, value) != value]
    raise ValueError(
        f"loading a state_dict failed: {listed(others)} gave other values than rank {at}, of {len(names)} states, "
        f"such as {shown}. {_HOW}"
    )


def _updates(number: int | None) -> str:
    return "an unknown number of updates" if number is None else f"{number} update{'s' * (number != 1)}"
