"""Buffers that are no plain dense tensors of real numbers: saved and loaded as they are, or refused at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from zoo import sim
from zoo.checkpointing import CheckpointError
from zoo.checkpointing.consolidation import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from zoo.checkpointing.foreign import load_safetensors
from zoo.checkpointing.zero_to_fp32 import Checkpoint, state_dict_of, tensors_of, write_model
from zoo.engine import initialize

WORLD = 2
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
}  # fmt: skip


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.view_as_complex(torch.arange(1.0, 13.0).view(2, 3, 2)).to(dtype)


def windows() -> torch.Tensor:
    """Neighbours that overlap: (3, 2) of 4 elements."""
    return torch.arange(4.0).unfold(0, 2, 1)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "complex64": lambda: numbers(torch.complex64),
    "complex128": lambda: numbers(torch.complex128),
    "conjugate": lambda: numbers(torch.complex64).conj(),
    "number": lambda: torch.tensor(1 + 2j),
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "expanded complex": lambda: torch.tensor([1 + 2j]).expand(4),
    "windows": windows,
}


class Net(nn.Module):
    def __init__(self, buffer: torch.Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("x", buffer, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def start(buffer: torch.Tensor, **options: Any) -> Any:
    return initialize(CONFIG, Net(buffer, **options))[0]


def zeros_like(buffer: torch.Tensor) -> torch.Tensor:
    """With the same strides."""
    found = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype)
    found.untyped_storage().copy_(torch.zeros(found.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage())
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_they_come_back_from_a_checkpoint(tmp_path: Path, kind: str, asynchronous: bool) -> None:
    def fn(rank: int) -> None:
        mine = KINDS[kind]() if rank == 0 else KINDS[kind]() * 2  # each rank's forwards keep their own
        engine = start(mine)
        engine.save_checkpoint(tmp_path, "one", asynchronous=asynchronous)
        engine.wait_for_checkpoint()
        other = start(zeros_like(mine))
        other.load_checkpoint(tmp_path, "one")
        assert torch.equal(other.module.x, mine)
        assert other.module.x.dtype is mine.dtype

    sim.run(WORLD, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_they_come_back_from_a_state_dict_and_files_of_weights(tmp_path: Path, kind: str) -> None:
    def fn(rank: int) -> None:
        mine = KINDS[kind]()
        engine = start(mine)
        other = start(zeros_like(mine))
        other.load_module_state_dict(engine.module_state_dict())
        assert torch.equal(other.module.x, mine)
        engine.save_16bit_model(tmp_path, "model.pt")
        engine.save_16bit_model(tmp_path, "model.safetensors")
        assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=True)["x"], mine)
        assert torch.equal(load_safetensors(tmp_path / "model.safetensors").tensor("x"), mine)
        there = load_file(tmp_path / "model.safetensors")["x"]
        assert torch.equal(torch.view_as_complex(there) if mine.is_complex() else there, mine)

    sim.run(WORLD, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_in_whole_weights_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    mine = KINDS[kind]()
    engine = start(mine)
    engine.save_checkpoint(tmp_path, "one", asynchronous=False)
    assert torch.equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path)["x"], mine)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt", weights_only=True)["x"], mine)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "whole.safetensors")
    assert torch.equal(load_safetensors(tmp_path / "whole.safetensors").tensor("x"), mine)
    script = tensors_of(Checkpoint(tmp_path))
    assert torch.equal(state_dict_of(script)["x"], mine)
    write_model(script, tmp_path / "script.safetensors", safe=True, max_shard_bytes=None)
    assert torch.equal(load_safetensors(tmp_path / "script.safetensors").tensor("x"), mine)


class Shared(nn.Module):
    """A module with a buffer has two names; what one buffer is twice is saved under one of its names."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))})
        self.also, self.layer = self.blocks["a"], nn.Linear(4, 4)
        self.register_buffer("kept", torch.full((2,), value))
        self.register_buffer("unsaved", self.kept, persistent=False)
        self.register_buffer("again", self.kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.also(x)).square().mean()


@pytest.mark.parametrize("stage", [0, 3])
def test_every_name_of_a_buffer_is_in_whole_weights(tmp_path: Path, stage: int) -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        engine = initialize({**CONFIG, "zero_optimization": {"stage": stage}}, Shared(3.0))[0]
        engine.backward(engine(torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))))
        engine.step()
        engine.save_checkpoint(tmp_path, asynchronous=False)
        return dict(engine.module_state_dict())

    expected = sim.run(WORLD, fn)[0]
    whole = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    script = state_dict_of(tensors_of(Checkpoint(tmp_path)))
    for found in (expected, whole, script):
        model = Shared(1.0)
        model.load_state_dict(found)  # strict
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name]), name


def test_a_view_of_another_buffer_stays_one(tmp_path: Path) -> None:
    def net(value: float) -> Net:
        model = Net(torch.full((1,), value))
        model.register_buffer("a_view", model.x.expand(4))
        return model

    initialize(CONFIG, net(3.0))[0].save_checkpoint(tmp_path, "one", asynchronous=False)
    engine = initialize(CONFIG, net(1.0))[0]
    engine.load_checkpoint(tmp_path, "one")
    assert torch.equal(engine.module.a_view, torch.full((4,), 3.0))
    assert engine.module.a_view.data_ptr() == engine.module.x.data_ptr()


@pytest.mark.parametrize("buffers", ["broadcast", "average"])
def test_ranks_keep_an_expanded_one_alike(buffers: str) -> None:
    def fn(rank: int) -> None:
        section = {"stage": 1, "buffers": buffers}
        engine = initialize({**CONFIG, "zero_optimization": section}, Net(torch.full((1,), rank + 1.0).expand(3)))[0]
        assert torch.equal(engine.module.x, torch.ones(3))

    sim.run(WORLD, fn)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.eye(3).to_sparse(), "it is a sparse tensor"),
        (lambda: torch.zeros(3, dtype=torch.float8_e4m3fnuz), r"no checkpoint holds torch\.float8_e4m3fnuz"),
    ],
)
def test_what_no_checkpoint_holds_is_refused_before_training(make: Callable[[], torch.Tensor], match: str) -> None:
    def fn(rank: int) -> None:
        with pytest.raises(ValueError, match=f"whose buffer 'x' cannot be saved: {match}.*persistent=False"):
            start(make())
        engine = start(make(), persistent=False)
        engine.train_batch(iter([(torch.ones(2, 4),)] * 4))

    sim.run(WORLD, fn)


def test_complex_numbers_do_not_become_real_ones(tmp_path: Path) -> None:
    start(numbers(torch.complex64)).save_checkpoint(tmp_path, "one", asynchronous=False)
    with pytest.raises(CheckpointError, match=r"buffer 'x' is torch\.float32; checkpoint 'one' has complex numbers"):
        start(torch.zeros(2, 3)).load_checkpoint(tmp_path, "one")
