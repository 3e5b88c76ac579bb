"""An ``mpu`` whose ranks share layers: the mesh that it describes, and which parameters are parts along it.

Legend: T tensor-parallel ranks, which have the same batch; rank (d, t) is the d-th of the data-parallel group t.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zoo.comm import Communicator
from zoo.config import ConfigError
from zoo.layout import axes_of, declare_split
from zoo.shard.values.writes import digest_of

TENSOR, EXPERT = "tensor", "expert"
_PIECE = 1 << 22
"""Elements whose bits are told apart at a time: on a device that takes 16 times their memory."""


def mesh_of(mpu: Any, model: nn.Module) -> Any:
    """A DeviceMesh of all ranks with the axes "data", "expert" where layers need it, and "tensor"; None where the mpu's
    data-parallel group has all ranks, so that none share layers. Collective over all ranks.

    Parameters that Megatron's layers mark (``tensor_model_parallel``, ``partition_dim``) are parts along "tensor", all
    others the same on all T ranks. Experts are at the place that the mesh has for them.

    Raises:
        ConfigError: groups of different sizes, or that do not have each rank once; ``ep_size`` does not divide them; a
            marked parameter does not say how it is cut; one that is not marked differs between the T ranks.
        NotImplementedError: the mpu has pipeline stages.
    """
    group = mpu.get_data_parallel_group()
    if not dist.is_initialized() or group is None:  # None: all ranks
        return None
    everyone = Communicator()
    own = dist.get_process_group_ranks(group)
    if not any(everyone.all_gather_object(len(own) < everyone.size)):
        return None
    stages = getattr(mpu, "get_pipeline_model_parallel_world_size", getattr(mpu, "get_pipe_parallel_world_size", int))()
    if stages > 1:
        raise NotImplementedError(
            f"initialize(mpu=...) with {stages} pipeline stages: give the layers as a deepspeed.PipelineModule, which "
            "has the stages, and leave them out of the mpu."
        )
    groups = sorted(set(map(tuple, everyone.all_gather_object(own))))
    size = axes_of(model).get(EXPERT, 1)
    ranks_of_all = sorted(rank for ranks in groups for rank in ranks)
    if ranks_of_all != list(range(everyone.size)) or len({len(ranks) for ranks in groups}) > 1:
        raise ConfigError(
            f"the data-parallel groups of the mpu are {[list(ranks) for ranks in groups]}; of {everyone.size} ranks "
            "each is in one of them, and all are of one size."
        )
    if len(groups[0]) % size:
        raise ConfigError(
            f"layers have ep_size={size}, and the mpu's data-parallel groups {len(groups[0])} ranks: ep_size divides "
            "their number."
        )
    from torch.distributed.device_mesh import DeviceMesh  # a second of imports that most jobs do without

    device = next((p.device.type for p in model.parameters()), "cpu")
    table: torch.Tensor = torch.tensor(groups).t().reshape(-1, size, len(groups))
    names = ("data", EXPERT, TENSOR) if size > 1 else ("data", TENSOR)
    mesh = DeviceMesh(device, table if size > 1 else table[:, 0], mesh_dim_names=names)
    declare_parts(model, mesh.get_local_rank(TENSOR), len(groups))
    check_repeated(model, mesh)
    return mesh


def declare_parts(model: nn.Module, rank: int, size: int) -> None:
    """Say of each marked parameter which part of the whole one this tensor-parallel rank has.

    Raises:
        ConfigError: it does not say along which dimension, or has several pieces (``partition_stride``).
    """
    for name, parameter in model.named_parameters():
        if not is_part(parameter):
            continue
        dim, pieces = getattr(parameter, "partition_dim", None), getattr(parameter, "partition_stride", 1)
        if not isinstance(dim, int) or not 0 <= dim < parameter.dim() or pieces != 1:
            raise ConfigError(
                f"parameter {name!r} is marked as tensor-parallel, with partition_dim={dim!r} and "
                f"partition_stride={pieces!r}; set partition_dim to the dimension that is cut (0 to "
                f"{parameter.dim() - 1}), and partition_stride to 1: one piece a rank."
            )
        shape = list(parameter.shape)
        offsets = [0] * len(shape)
        offsets[dim], shape[dim] = rank * shape[dim], size * shape[dim]
        declare_split(parameter, [TENSOR], shape=shape, offsets=offsets)


def is_part(parameter: Any) -> bool:
    """Whether Megatron's layers say that tensor-parallel ranks have other parts of it."""
    return bool(getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False))


def check_repeated(model: nn.Module, mesh: Any) -> None:
    """Whether what is no part is the same on all tensor-parallel ranks. Collective over them.

    Raises:
        ConfigError: a parameter is not; it names it.
    """
    comm = Communicator.of_axes(mesh, [TENSOR])
    try:
        mine = {name: _digest(p) for name, p in model.named_parameters() if not is_part(p)}
        theirs = comm.all_gather_object(mine)
    finally:
        comm.close()
    for name in dict.fromkeys(name for one in theirs for name in one):
        if len({one.get(name) for one in theirs}) > 1:
            raise ConfigError(
                f"parameter {name!r} differs between the tensor-parallel ranks {comm.ranks} of the mpu. If it is a "
                "part of a larger one, set its attributes tensor_model_parallel = True and partition_dim, as layers of "
                "Megatron do; if not, give all of these ranks the same values before initialize()."
            )


def _digest(parameter: torch.Tensor) -> Any:
    """Shape and a number that stands for the bits; of one that zoo.zero.Init has split the shape alone."""
    shape = tuple(parameter.shape)
    if hasattr(type(parameter), "_zoo_adoptable") or parameter.is_meta:
        return shape
    flat = parameter.detach().reshape(-1)
    pieces = flat.tensor_split(list(range(_PIECE, flat.numel(), _PIECE)))
    return shape, tuple(int(digest_of(piece)) for piece in pieces)
