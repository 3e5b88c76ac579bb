"""Process groups with names of their own: made by their members, in the same order, and destroyed again."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# How often each (name, ranks) was made under a default group: all its members have made it equally often, whatever
# groups the other ranks of the job made meanwhile. torch's own names come from a counter of all groups, which ranks
# that belong to different groups count differently, and then wait for each other under different names for ever.
_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def check_partition(groups: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """``groups`` as lists.

    Raises:
        ValueError: some rank of 0 … size-1 is not in exactly one of them.
    """
    lists = [[int(r) for r in group] for group in groups]
    if sorted(r for group in lists for r in group) != list(range(size)) or not all(lists):
        raise ValueError(
            f"partition got the groups {lists} of a group of {size} rank{'s' if size > 1 else ''}; it takes groups in "
            f"which each of the ranks 0 to {size - 1} is once, and all of them on every rank."
        )
    return lists


def make_groups(
    groups: Sequence[Sequence[int]], name: str, parent: Any, *, alone: bool = False, backend: str | None = None
) -> Any:
    """Make a process group for each list of global ranks; returns the one this rank is in, None if it has one rank.

    Collective over all ranks in ``groups``. Groups of one rank are made only with ``alone``. ``parent`` (None: the
    default group) gives the timeout. ``backend``: that of the default group if not given.

    Raises:
        NotImplementedError: the default group is bound to a device, where every group is split from it by all ranks of
            the job, and ``groups`` has only some of them.
    """
    default: Any = dist.group.WORLD
    num_ranks = sum(map(len, groups))
    if max(map(len, groups)) == 1 and not alone:
        return None
    if backend is None and default.bound_device_id is not None and num_ranks < dist.get_world_size():
        raise NotImplementedError(
            f"the group {name!r} was asked for by {num_ranks} of {dist.get_world_size()} ranks, but with "
            "init_process_group(device_id=...) every group is split from the default one, by all ranks together: make "
            "the partition from the communicator of all ranks, or initialise without device_id."
        )
    mine = None
    for ranks in groups:
        if len(ranks) > 1 or alone:
            found = _make(list(ranks), name, timeout_of(parent), backend)
            mine = mine if found is dist.GroupMember.NON_GROUP_MEMBER else found
    return mine


def _make(ranks: list[int], name: str, timeout: timedelta | None, other: str | None = None) -> Any:
    # new_group gives no choice of the name, and split_group is for few backends: this is the part that both stand on.
    default: Any = dist.group.WORLD
    rank = dist.get_rank()
    backend, store = c10d._world.pg_map[default]
    backend = other if other is not None else backend
    digest = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    key = f"zoo/{name}/{digest}"
    member = rank in ranks
    counts = _made.setdefault(default, Counter())
    if member:
        counts[key] += 1
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank) if member else None,
        ranks,
        backend,
        store,
        # A new number, because the keys of a group that was destroyed stay in the store.
        group_name=cast(Any, f"{key}/{counts[key]}"),
        timeout=timeout if timeout is not None else c10d._get_default_timeout(backend),
        device_id=default.bound_device_id if other is None else None,
        group_desc=name,
    )
    if member:
        c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
    return group


def timeout_of(group: Any) -> timedelta | None:
    """The timeout of a process group (None: of the default one), None where its backend does not tell."""
    group = group if group is not None else dist.group.WORLD
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    found: timedelta | None = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return found


def of_mesh(mesh: Any, axes: Sequence[str]) -> list[list[int]]:
    """Global ranks of the groups along ``axes`` of a DeviceMesh, flattened in the order that the mesh has them.

    Raises:
        ValueError: names that the mesh does not have, or the same one twice, or none.
    """
    names = tuple(mesh.mesh_dim_names or ())
    if not axes or len(set(axes)) != len(axes) or not set(axes) <= set(names):
        raise ValueError(
            f"of_axes got the axes {tuple(axes)} of a mesh with {names}; it takes one or more of these, each once."
        )
    inner = [names.index(axis) for axis in names if axis in axes]
    outer = [dim for dim in range(len(names)) if dim not in inner]
    size = 1
    for dim in inner:
        size *= mesh.mesh.shape[dim]
    table: list[list[int]] = mesh.mesh.permute(*outer, *inner).reshape(-1, size).tolist()
    return table
