"""Activation checkpointing on a real device: every storage gives back every byte, dropout repeats, nothing stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo.activation_checkpointing import ActivationCheckpointing, ActivationCheckpointingConfig, CudaRNGStatesTracker
from zoo.activation_checkpointing.storages import Contiguous, Host, Keep, Nvme, Storage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
STORAGES = ("keep", "contiguous", "host", "contiguous host", "nvme")


def storage_of(name: str, folder: Path) -> Storage:
    if name == "nvme":
        return Nvme(folder)
    made: dict[str, Any] = {
        "keep": Keep, "contiguous": lambda: Contiguous(6), "host": Host,
        "contiguous host": lambda: Host(num_checkpoints=6),
    }  # fmt: skip
    storage: Storage = made[name]()
    return storage


def run(how: Any, tracker: CudaRNGStatesTracker, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.3)).to("cuda", dtype) for _ in range(5)]
    tracker.reset()
    tracker.add("a", 7)
    torch.manual_seed(1)
    x = torch.randn(64, 512, device="cuda", dtype=dtype, requires_grad=True)

    def call(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
        with tracker.fork("a"):
            y = nn.functional.dropout(y, 0.2)
        return layer(y)

    for _ in range(2):
        y = x
        for layer in layers:
            y = how(call, layer, y)
        y.float().square().sum().backward()
    grads = [x.grad, *(p.grad for layer in layers for p in layer.parameters())]
    with tracker.fork("a"):
        drawn = [torch.rand(3, device="cuda")]
    return [g.clone() for g in grads if g is not None] + drawn + [torch.rand(3, device="cuda")]


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_is_as_without(tmp_path: Path, name: str, reentrant: bool, dtype: torch.dtype) -> None:
    tracker = CudaRNGStatesTracker("cuda")
    expected = run(lambda function, *args: function(*args), tracker, dtype)
    storage = storage_of(name, tmp_path)
    config = ActivationCheckpointingConfig(use_reentrant=reentrant)
    checkpointing = ActivationCheckpointing(config, storage=storage, tracker=tracker)
    found = run(checkpointing.checkpoint, tracker, dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert checkpointing.saved_bytes == 0
    storage.reset()
    if isinstance(storage, Host):
        assert storage.pool.pinned
        assert storage.pool.stats().in_use_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_host_memory_takes_the_place_of_the_devices() -> None:
    checkpointing = ActivationCheckpointing(storage=Host())
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = x
    for _ in range(8):
        y = checkpointing(torch.sin, y)
    torch.cuda.synchronize()
    assert checkpointing.saved_bytes == 8 * x.nbytes
    assert torch.cuda.memory_allocated() - before <= 2 * x.nbytes
    y.sum().backward()


def test_numbers_of_a_function_without_arguments_on_the_device_are_drawn_again() -> None:
    scale = torch.ones((), requires_grad=True)
    checkpointing = ActivationCheckpointing(storage=Keep())
    seen = []

    def function(scale: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(16, device="cuda")
        seen.append(noise)
        return (noise * scale.to("cuda").exp()).sin()

    checkpointing(function, scale).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)
