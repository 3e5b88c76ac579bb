"""LoRA of peft beside packed and compressed layers: adapters train, and what they stand beside stays as it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.compression.models import weights
from torch import Tensor, nn

from zoo.compression import CompressionScheduler, init_compression
from zoo.compression.packed import PackedLinear, pack_model
from zoo.compression.post_training import Recipe, Uniform, quantise

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def trained(model: nn.Module, base: dict[str, Tensor]) -> tuple[float, float]:
    """The losses before and after some steps; of ``base`` nothing moves, and of the rest all."""
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(60):
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) == ("lora" not in name), name
    for name, value in base.items():
        assert torch.equal(model.state_dict()[name], value), name
    return losses[0], losses[-1]


@pytest.mark.parametrize("bits", [8, 4])
def test_lora_trains_beside_packed_layers(bits: int, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.tuners.lora import Linear

    def packed() -> nn.Module:
        model = network()
        return pack_model(model, quantise(model, Recipe(grid=Uniform(bits=bits), group_size=16)))

    def config() -> LoraConfig:
        found = LoraConfig(r=8, target_modules=["0", "2"])
        found._register_custom_module({PackedLinear: Linear})
        return found

    plain, x = packed(), torch.randn(4, 32)
    wanted = plain(x)
    model = get_peft_model(packed(), config())
    assert torch.equal(model(x), wanted), "an adapter begins with nothing"
    first, last = trained(model, {k: v.clone() for k, v in model.state_dict().items() if "lora" not in k})
    assert last < 0.8 * first
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(packed(), str(tmp_path), config=config())
    torch.testing.assert_close(again(x), model(x))
    assert not torch.allclose(model(x), wanted)


def test_lora_trains_beside_weights_with_transforms() -> None:
    from peft import LoraConfig, get_peft_model

    section = {"weight_quantization": weights(start=4, target=4)}
    model = init_compression(network(), {"compression_training": section})
    CompressionScheduler(model).set_step(1)
    x = torch.randn(4, 32)
    wanted = model(x)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["0", "2"]))
    assert torch.equal(adapted(x), wanted), "of the quantised weights"
    first, last = trained(adapted, {})
    assert last < 0.8 * first
