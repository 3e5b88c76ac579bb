"""``deepspeed.inference.quantization``: tensors and layers in codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zoo.deepspeed.inference.quantization.layers import QuantizedLinear
from zoo.deepspeed.inference.quantization.quantization import _init_group_wise_weight_quantization
from zoo.deepspeed.inference.quantization.utils import DeQuantizer, Quantizer

from zoo.config import ConfigError
from zoo.nn import PackedLinear

SAID: dict[str, Any] = {"num_bits": 4, "group_size": 16, "group_dim": 1, "symmetric": False}


@given(bits=st.sampled_from([4, 8]), dim=st.sampled_from([0, 1, 2, -1]), groups=st.integers(1, 3),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))  # fmt: skip
def test_an_element_comes_back_within_half_a_step(bits: int, dim: int, groups: int, dtype: torch.dtype) -> None:
    shape = [2, 3, 4]
    shape[dim] = 6 * groups
    x = torch.randn(shape, generator=torch.Generator().manual_seed(groups)).to(dtype)
    before, config = x.clone(), {**SAID, "num_bits": bits, "group_size": 6, "group_dim": dim}
    codes, scale, low = Quantizer(config).quantize(x)
    assert torch.equal(x, before)
    assert codes.dtype is torch.uint8
    assert codes.numel() == x.numel() * bits // 8
    assert scale.numel() == low.numel() == x.numel() // 6
    found = DeQuantizer(config, dtype).dequantize(codes, scale, low)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    axis = dim % 3
    each, steps = x.float().unflatten(axis, (-1, 6)), 1 / scale.float()
    error = (found.float().unflatten(axis, (-1, 6)) - each).abs()
    assert bool(
        (error <= 0.5 * steps + 8 * torch.finfo(dtype).eps * (each.abs() + low.float().abs() + 255 * steps)).all()
    )


def test_two_codes_a_byte_and_equal_elements() -> None:
    x = torch.tensor([[0.0, 15.0, 3.0, 7.0]])
    codes, scale, low = Quantizer({**SAID, "group_size": 4}).quantize(x)
    assert codes.tolist() == [[0x0F, 0x37]]
    assert (scale.shape, low.tolist()) == ((1, 1, 1), [[[0.0]]])
    same = torch.full((2, 32), 5.0)
    assert torch.equal(DeQuantizer(SAID, torch.float32).dequantize(*Quantizer(SAID).quantize(same)), same)
    near = torch.tensor([[1e-6, 3e-6]], dtype=torch.float16)  # 15 / 2e-6 is more than fp16 holds
    config = {**SAID, "group_size": 2}
    found = DeQuantizer(config, torch.float16).dequantize(*Quantizer(config).quantize(near))
    assert float((found - near).abs().max()) <= 1.6e-5


@pytest.mark.parametrize(
    ("more", "told"),
    [({"num_bits": 3}, "num_bits=3; codes have 4 or 8 bits"), ({"symmetric": True}, "set it to False"),
     ({"group_size": 5}, "32 elements along dim 1, which are no whole number of groups of 5")],
)  # fmt: skip
def test_codes_that_cannot_be(more: dict[str, Any], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        Quantizer({**SAID, **more}).quantize(torch.zeros(2, 32))
    with pytest.raises(ConfigError, match="lacks num_bits, group_size, group_dim, symmetric"):
        DeQuantizer({}, torch.float32)
    with pytest.raises(ConfigError, match="two a byte, and the last dim has 3"):
        Quantizer({**SAID, "group_dim": 0}).quantize(torch.zeros(16, 3))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_linear_layer_multiplies_codes(bits: int) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 8), torch.randn(3, 32)
    config = {**SAID, "num_bits": bits}
    packed = QuantizedLinear(config, layer)
    dense = DeQuantizer(config, torch.float32).dequantize(*Quantizer(config).quantize(layer.weight.detach()))
    torch.testing.assert_close(packed.dense(), dense, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed(x), nn.functional.linear(x, dense, layer.bias), rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match="group_dim=0; groups of a linear layer lie along rows"):
        QuantizedLinear({**config, "group_dim": 0}, layer)


def test_layers_of_a_document() -> None:
    model = nn.ModuleDict({"fc1": nn.Linear(32, 8), "fc2": nn.Linear(16, 8), "other": nn.Linear(16, 8)})
    document = {"weight_quantization": {"post_init_quant": {"fc1": {**SAID, "group_size": 32}, "fc2": SAID}}}
    assert _init_group_wise_weight_quantization(model, document) is model
    found = {name: (m.bits, m.group_size) for name, m in model.items() if isinstance(m, PackedLinear)}
    assert found == {"fc1": (4, 32), "fc2": (4, 16)}
    for wrong in ({}, {"weight_quantization": {}}):
        with pytest.raises(AssertionError, match=r"no weight_quantization\.post_init_quant"):
            _init_group_wise_weight_quantization(model, wrong)
