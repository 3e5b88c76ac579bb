"""The groups of ranks of an Init, checked on all ranks before anything is built."""

from __future__ import annotations

from typing import Any

import torch

from zoo.comm import Communicator
from zoo.shard.placement.axes import Axes


def axes_of(comm: Communicator, place: int, group: Any) -> Axes:
    """Which ranks split a value, and which chunk each of them keeps. Collective over ``comm``.

    Args:
        place: the number that this rank gives itself among all ranks.
        group: the ranks that split it, a part of ``comm``; None for all. Its ranks keep chunks in the order of their
            numbers.

    Raises:
        ValueError: on all ranks, unless numbers are 0 to N - 1, each once, and groups cut ``comm`` into equal parts.
    """
    places = _places_of(comm, place)
    shard = _secondary_of(comm, group) or comm
    numbers = [places[comm.ranks.index(rank)] for rank in shard.ranks]
    order = tuple(sorted(numbers).index(number) for number in numbers)
    alone = comm.partition([[rank] for rank in range(comm.size)], name="alone")  # Init reduces nothing
    return Axes(
        world=comm, shard=shard, replicas=alone, local=alone, across=shard,
        places=order if order != tuple(range(shard.size)) else None,
    )  # fmt: skip


def _places_of(comm: Communicator, place: int) -> list[int]:
    places = _of_all(comm, place)
    if sorted(places) != list(range(comm.size)):
        raise ValueError(
            f"get_partition_rank() gave {', '.join(map(str, places))} on the ranks 0 to {comm.size - 1}; it must give "
            f"each number from 0 to {comm.size - 1} on one rank."
        )
    return places


def _secondary_of(comm: Communicator, group: Any) -> Communicator | None:
    # None where it would change nothing.
    given = None
    if group is not None:
        given = group if isinstance(group, Communicator) else Communicator(group)
    ranks = () if given is None else given.ranks
    outside = [rank for rank in ranks if rank not in comm.ranks]
    # First the ranks tell what they have: those without a group, or with a bad one, must not be waited for.
    sizes = _of_all(comm, -1 if outside else len(ranks))
    if -1 in sizes:
        told = f"; rank {comm.rank} has the ranks {list(ranks)}" if outside else ""
        raise ValueError(
            f"zero_param_parallel_group must be a part of the data-parallel group, the ranks {list(comm.ranks)}; on "
            f"rank {sizes.index(-1)} it is not{told}."
        )
    if len(set(sizes)) > 1 or (sizes[0] and comm.size % sizes[0]):
        raise ValueError(
            f"zero_param_parallel_group has {', '.join(map(str, sizes))} ranks on the ranks 0 to {comm.size - 1} of "
            "the data-parallel group (0: none given); groups must be of one size, which divides the number of ranks."
        )
    return given if given is not None and 1 < given.size < comm.size else None


def _of_all(comm: Communicator, number: int) -> list[int]:
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in comm.backend else torch.device("cpu")
    found = torch.empty(comm.size, dtype=torch.int64, device=device)
    comm.all_gather(found, torch.tensor([number], dtype=torch.int64, device=device)).wait()
    return [int(value) for value in found.tolist()]
