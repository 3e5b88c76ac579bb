"""``deepspeed.comm``'s questions: which rank this is, which groups there are, what torch can do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from zoo.comm import speak_as_torchrun
from zoo.comm.launch import PORT


class NotJoinedError(AssertionError, ValueError):
    """There is no process group yet; DeepSpeed raises an AssertionError, torch a ValueError."""


def joined(name: str) -> None:
    """Raise unless a process group is joined."""
    if not is_initialized():
        raise NotJoinedError(
            f"{name}() needs a process group: call deepspeed.init_distributed() first, in a script that a launcher "
            "started, or with rank= and world_size=."
        )


def is_available() -> bool:
    """Whether this torch can communicate."""
    return dist.is_available()


def is_initialized() -> bool:
    """Whether a process group is joined, by whomever."""
    found = dist.is_available() and dist.is_initialized()
    if found:
        from zoo.deepspeed.adapters.root.hugging_face import tell_accelerate

        tell_accelerate()
    return found


def get_rank(group: Any = None) -> int:
    """This process's number in the group; -1 outside of it."""
    joined("get_rank")
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """Ranks of the group; -1 outside of it."""
    joined("get_world_size")
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """This process's number on its node, as the launcher says (LOCAL_RANK); 0 without."""
    joined("get_local_rank")
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The number in the job of the rank that has ``group_rank`` in the group."""
    joined("get_global_rank")
    return dist.get_global_rank(group or get_world_group(), group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The numbers in the job of a group's ranks, in its order."""
    joined("get_all_ranks_from_group")
    return list(dist.get_process_group_ranks(group or get_world_group()))


def get_world_group() -> Any:
    """The group of all ranks."""
    joined("get_world_group")
    return dist.group.WORLD


def new_group(ranks: Any = None, **options: Any) -> Any:
    """A group of these ranks; all ranks of the job call it, with the same list. ``options`` are torch's."""
    joined("new_group")
    return dist.new_group(None if ranks is None else list(ranks), **options)


def destroy_process_group(group: Any = None) -> None:
    """Leave the group, or all of them."""
    dist.destroy_process_group(group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """A ``DeviceMesh`` with named axes over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    joined("initialize_mesh_device")
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def mpi_discovery(distributed_port: int = PORT, verbose: bool = True) -> None:
    """Set the variables that torchrun would from those of SLURM or MPI; see :func:`zoo.comm.speak_as_torchrun`."""
    speak_as_torchrun(distributed_port)


def has_all_gather_into_tensor() -> bool:
    """True: every torch that zoo runs with has it."""
    joined("has_all_gather_into_tensor")
    return True


def has_reduce_scatter_tensor() -> bool:
    """True: every torch that zoo runs with has it."""
    joined("has_reduce_scatter_tensor")
    return True


def has_all_reduce_coalesced() -> bool:
    """True: it is here."""
    joined("has_all_reduce_coalesced")
    return True


def has_coalescing_manager() -> bool:
    """Whether torch has its (private) manager of operations that are issued as one."""
    joined("has_coalescing_manager")
    return hasattr(dist.distributed_c10d, "_coalescing_manager")
