"""The groups of ranks of an Init, checked on all ranks before anything is built."""

from __future__ import annotations

from typing import Any

import torch

from zoo.comm import Communicator


def places_of(comm: Communicator, place: int) -> list[int]:
    """Which part each rank keeps, from what each rank says of itself. Collective.

    Raises:
        ValueError: on all ranks, unless they are 0 to N - 1, each once.
    """
    places = _of_all(comm, place)
    if sorted(places) != list(range(comm.size)):
        raise ValueError(
            f"get_partition_rank() gave {', '.join(map(str, places))} on the ranks 0 to {comm.size - 1}; it must give "
            f"each number from 0 to {comm.size - 1} on one rank."
        )
    return places


def secondary_of(comm: Communicator, group: Any) -> Communicator | None:
    """The communicator of a secondary group; None where it would change nothing. Collective over ``comm``.

    Raises:
        ValueError: on all ranks, unless the groups of all ranks are of one size and cut ``comm`` into whole groups.
    """
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
