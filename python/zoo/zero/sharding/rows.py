"""A rank's rows of a tensor as a DTensor, which torch's own functions gather, copy and write.

Legend: p ranks of a shard group; a tensor of n rows, of which rank r has [r·k, (r+1)·k), k = ceil(n / p).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from zoo.comm import Communicator
from zoo.zero.sharding.buckets import Bucket
from zoo.zero.sharding.roles import PARAMETER
from zoo.zero.state.whole import share_range

_MESHES: WeakKeyDictionary[Communicator, Any] = WeakKeyDictionary()


def mesh_of(comm: Communicator, device_type: str) -> Any:
    """The ranks of ``comm`` as a DeviceMesh of one axis, over the same process group."""
    from torch.distributed.device_mesh import DeviceMesh

    if comm not in _MESHES:
        group: Any = comm.group if comm.group is not None else torch.distributed.group.WORLD
        _MESHES[comm] = DeviceMesh.from_group(group, device_type)
    return _MESHES[comm]


def rows_of(whole: torch.Tensor, comm: Communicator | None, device: torch.device) -> torch.Tensor:
    """A copy of this rank's rows of ``whole``, as a DTensor over ``comm``; of what has no rows to split all of it.

    Args:
        comm: None for all of it.
        device: of the copy.
    """
    if comm is None or comm.size == 1 or not whole.numel() or not whole.dim():
        return whole.to(device, copy=True)
    from torch.distributed.tensor import DTensor, Shard

    each = -(-whole.shape[0] // comm.size)
    local = whole[comm.rank * each : (comm.rank + 1) * each].to(device, copy=True)
    made: torch.Tensor = DTensor.from_local(
        local, mesh_of(comm, whole.device.type), [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


@torch.no_grad()
def parameter_rows(bucket: Bucket, slot: int) -> torch.Tensor:
    """This rank's rows of a partitioned parameter; what is gathered meanwhile is this one. Collective."""
    tensor, offset = bucket.layout.tensors[slot], bucket.layout.offsets[slot]
    whole = torch.empty(tensor.numel, dtype=bucket.spec.dtype, device=bucket.device)
    first, last = bucket.own_range()
    low, high = max(first, offset), min(last, offset + tensor.numel)
    if low < high:
        whole[low - offset : high - offset].copy_(bucket.roles[PARAMETER].read(low - first, high - low))
    share_range(bucket, whole, offset)
    return rows_of(whole.view(tensor.shape), bucket.shard_group, bucket.device)
