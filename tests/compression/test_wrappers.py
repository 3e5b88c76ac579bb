"""Models that others have wrapped, built in shards, or whose weights others read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.compression.models import Words, document, inputs, start, train, weights
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zoo import sim
from zoo.compression import CompressionScheduler, init_compression, redundancy_clean, transforms_of
from zoo.zero import Init


def test_what_distributed_data_parallel_wraps_is_compressed_inside(tmp_path: Path) -> None:
    config = {"compression_training": {"weight_quantization": weights(start=3, target=3)}}
    x = torch.randint(12, (2, 4), generator=torch.Generator().manual_seed(0))
    plain = init_compression(Words(), config)
    wanted = plain(x, x)
    wanted.backward()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model = Words()
        wrapped = DistributedDataParallel(model)
        assert init_compression(wrapped, config) is wrapped
        found = wrapped(x, x)
        found.backward()
    finally:
        dist.destroy_process_group()
    assert torch.equal(found, wanted)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    redundancy_clean(wrapped, config)
    assert not transforms_of(model)


def test_a_model_that_was_built_in_shards_trains_the_same() -> None:
    config = document(3, compression={"weight_quantization": weights(), "activation_quantization": inputs()})

    def job(rank: int) -> tuple[list[float], list[float]]:
        with Init(config_dict_or_path=config):
            model = Words()
        return train(start(config, model), 3), train(start(config), 3)

    for sharded, whole in sim.run(2, job):
        assert sharded == whole


class Reads(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.called(x), self.read.weight)


def test_a_layer_that_is_not_called_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    section = weights(start=3, target=3, schedule_offset=1)
    model = init_compression(Reads(), {"compression_training": {"weight_quantization": section}})
    scheduler = CompressionScheduler(model)
    with caplog.at_level(logging.WARNING, logger="zoo.compression"):
        for _ in range(4):
            model(torch.ones(1, 3))
            scheduler.step()
    (record,) = caplog.records
    assert record.getMessage().startswith("in step 1 nobody called the modules of read.weight: ")
