"""Parameters take the 16-bit type, buffers keep theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zoo.engine
from zoo.config import ConfigError


class Rotary(nn.Module):
    """Frequencies that bf16 cannot hold, a counter, and a bias of a router that is named."""

    _keep_in_fp32_modules_strict = ("*bias_of_router",)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("frequencies", torch.tensor([1.0001, 0.10001, 0.010001, 0.0010001]), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("bias_of_router", torch.full((4,), 5.01).bfloat16())
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).float().square().mean()


def start(**document: Any) -> Rotary:
    model = Rotary()
    zoo.engine.initialize(
        {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **document}, model
    )
    return model


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_keep_their_type(kind: str, stage: int) -> None:
    model = start(**{kind: {"enabled": True}}, zero_optimization={"stage": stage})
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    assert model.linear.weight.dtype == model.norm.weight.dtype == dtype
    assert model.norm.running_mean.dtype == dtype  # type: ignore[union-attr]
    assert torch.equal(model.frequencies, Rotary().frequencies)
    assert (model.steps.dtype, model.none) == (torch.long, None)
    assert model.bias_of_router.dtype == torch.float32
    assert model(torch.randn(3, 4).to(dtype)).isfinite()


@pytest.mark.parametrize("names", ["auto", [], ["frequ*ies"]])
def test_a_type_for_buffers(names: Any) -> None:
    types = {"buffer_dtype": "bf16", "keep_in_fp32_modules": names, "param_dtype": "bf16"}
    model = start(bf16={"enabled": True}, data_types=types)
    full, half = torch.float32, torch.bfloat16
    assert model.frequencies.dtype == (full if names == ["frequ*ies"] else half)
    assert model.bias_of_router.dtype == (full if names == "auto" else half)
    assert model.steps.dtype == torch.long


def test_float32_is_left_alone() -> None:
    model = start()
    assert model.bias_of_router.dtype == torch.bfloat16
    assert start(data_types={"buffer_dtype": "fp32"}).bias_of_router.dtype == torch.float32


def test_two_types_of_parameters() -> None:
    with pytest.raises(ConfigError, match=r"param_dtype is 'bf16', and fp16.enabled and bf16.enabled say fp32"):
        start(data_types={"param_dtype": "bf16"})


class Turning(nn.Module):
    """A complex parameter, which no 16-bit type holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.turn = nn.Parameter(torch.full((3,), 1 + 2j))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_complex_parameter_keeps_its_imaginary_part_and_is_refused_by_name(kind: str, stage: int) -> None:
    model = Turning()
    document = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage}}
    with pytest.raises(ValueError, match=r"parameter 'turn' is torch\.strided of torch\.complex64"):
        zoo.engine.initialize({"train_micro_batch_size_per_gpu": 2, **document, kind: {"enabled": True}}, model)
    assert torch.equal(model.turn.detach(), Turning().turn.detach())
