"""Weights that are DTensors are refused, and nothing is attached."""

from __future__ import annotations

import pytest
from tests.compression.models import weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from zoo import sim
from zoo.compression import init_compression, transforms_of


def test_a_dtensor_is_refused() -> None:
    def job(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
        model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(NotImplementedError, match=r"1\.weight is a DTensor"):
            init_compression(model, {"compression_training": {"weight_quantization": weights()}})
        assert not transforms_of(model)

    sim.run(2, job)
