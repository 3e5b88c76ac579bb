"""``deepspeed.runtime.sequence_parallel.parallel_state_sp``: which ranks share a sequence. It is an ``mpu``.

Consecutive ranks do; ``initialize(mpu=...)`` makes a mesh of the axes "data" and "sequence" of it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as _dist

from zoo.comm.groups import make_groups
from zoo.deepspeed.adapters.communication import comm as dist

_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by the group of all ranks, so that a job forgets its own


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Groups of so many consecutive ranks. A collective of the job, once.

    Raises:
        AssertionError: no process group, or they are there. ValueError: fewer than 2. RuntimeError: the number of ranks
            is no multiple of it.
    """
    if not dist.is_initialized():
        raise AssertionError("initialize_sequence_parallel() needs a process group: call init_distributed() first.")
    world, size = _dist.group.WORLD, dist.get_world_size()
    if sequence_parallel_size <= 1:
        raise ValueError(f"initialize_sequence_parallel({sequence_parallel_size}); a sequence is shared by 2 or more.")
    if size % sequence_parallel_size:
        raise RuntimeError(f"{size} ranks are not divisible into groups of {sequence_parallel_size} that share one.")
    if world in _GROUPS:
        raise AssertionError("initialize_sequence_parallel() was called before: the groups are there.")
    lists = [list(range(first, first + sequence_parallel_size)) for first in range(0, size, sequence_parallel_size)]
    _GROUPS[world] = make_groups(lists, "sequence", None)


def get_sequence_parallel_group() -> Any:
    """The ranks that share sequences with this one.

    Raises:
        AssertionError: :func:`initialize_sequence_parallel` was not called.
    """
    found = _GROUPS.get(_dist.group.WORLD) if _dist.is_initialized() else None
    if found is None:
        raise AssertionError("no ranks share a sequence: call initialize_sequence_parallel() first.")
    return found


def get_sequence_parallel_world_size() -> int:
    """How many there are."""
    return dist.get_world_size(get_sequence_parallel_group())


def get_sequence_parallel_rank() -> int:
    """This process's number among them."""
    return dist.get_rank(get_sequence_parallel_group())


def get_sequence_data_parallel_group() -> Any:
    """All ranks: parameters are the same on each, and gradients are averaged over them."""
    get_sequence_parallel_group()
    return dist.get_world_group()


def get_sequence_data_parallel_world_size() -> int:
    """How many there are."""
    return dist.get_world_size(get_sequence_data_parallel_group())


def get_sequence_data_parallel_rank() -> int:
    """This process's number among them."""
    return dist.get_rank(get_sequence_data_parallel_group())


# What an mpu is asked beside.
get_model_parallel_rank = get_sequence_parallel_rank
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_group = get_sequence_parallel_group
