"""Packed layers as weights of torchao and back: the same codes, the same values, its own products as judge."""

from __future__ import annotations

import copy
import importlib.util
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import Tensor, nn

from zoo.compression.export import from_torchao, load_torchao, save_torchao, to_torchao
from zoo.compression.export.torchao import LAYOUTS, Layout, tensor_of
from zoo.compression.packed import PackedLinear, pack_model
from zoo.compression.post_training import (
    Binary,
    Floating,
    Layer,
    Recipe,
    Ternary,
    Uniform,
    nearest,
    quantise,
    zeroquant,
)

THERE = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not THERE, reason="the package torchao is not installed")
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 16, bias=False)).eval()


def packed(bits: int = 4, *, symmetric: bool = True, size: int = 16, shift: float = 0.0) -> nn.Module:
    model = network()
    with torch.no_grad():
        model[0].weight.add_(shift)
    model[0].weight.data[3] = 0.25  # groups of equal elements
    return pack_model(model, quantise(model, Recipe(grid=Uniform(bits=bits, symmetric=symmetric), group_size=size)))


def dense(model: nn.Module) -> list[Tensor]:
    return [m.dense() for m in model if isinstance(m, PackedLinear)]


def states(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


# -- without the package ----------------------------------------------------------------------------------------------


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    for call in (to_torchao, from_torchao):
        with pytest.raises(ImportError, match=r"torchao 0.18 or newer is needed.*zoo-compression\[torchao\]"):
            call(packed())


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        (Ternary(), "x has the grid Ternary.*equal steps of 2 to 8 bits"),
        (Binary(), "x has the grid Binary"),
        (Floating(format="fp8_e4m3"), "x has the grid Floating"),
    ],
)
def test_what_torchao_cannot_hold_is_refused(grid: Any, sentence: str) -> None:
    layer = Layer(quantised=nearest(torch.randn(8, 32), grid, group_size=16))
    with pytest.raises(ValueError, match=sentence):
        tensor_of(layer, "x", dtype=torch.float32)


def test_other_refusals() -> None:
    three = Layer(quantised=nearest(torch.randn(8, 32), Uniform(bits=3), group_size=16))
    with pytest.raises(ValueError, match=r"x has 3 bits; the layout 'packed' is for 4"):
        tensor_of(three, "x", layout="packed", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"groups of 16 on cpu; .* 32, 64, 128"):
        to_torchao(packed(), layout="cpu")
    with pytest.raises(
        ValueError, match=r"layout='flat', dtype=torch.int8; the layout must be one of plain, packed, cpu"
    ):
        to_torchao(packed(), layout="flat", dtype=torch.int8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no packed layer"):
        to_torchao(network())
    model = network()
    layers = quantise(model, Recipe(group_size=16, low_rank=2))
    with pytest.raises(ValueError, match=r"0 has the grid .* and a low-rank part"):
        to_torchao(model, layers)
    with pytest.raises(ValueError, match=r"1 is a GELU; only linear layers"):
        to_torchao(model, {"1": three})


# -- with it ----------------------------------------------------------------------------------------------------------


@needs_torchao
@pytest.mark.slow
@examples(times=1)
@given(
    bits=st.sampled_from([2, 3, 4, 5, 8]), symmetric=st.booleans(), size=st.sampled_from([16, 32, 48]),
    shift=st.sampled_from([0.0, 5.0, -100.0]), dtype=st.sampled_from(list(EPSILON)),
)  # fmt: skip
def test_values_are_zoos_but_for_the_rounding_of_the_dtype(
    bits: int, symmetric: bool, size: int, shift: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(bits)
    weight = torch.randn(6, 96) + shift
    weight[2] = shift + 0.5
    layer = Layer(quantised=nearest(weight, Uniform(bits=bits, symmetric=symmetric), group_size=size))
    found: Any = tensor_of(layer, dtype=dtype)
    assert found.dtype is dtype
    error = (found.dequantize().float() - layer.values).abs()
    if symmetric:
        assert (error <= 1.01 * EPSILON[dtype] * layer.values.abs()).all()
    else:
        scale, low = (p.repeat_interleave(size, 1) for p in layer.quantised.params)
        assert (error <= 4 * EPSILON[dtype] * (low.abs() + 2**bits * scale)).all()


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_products_are_those_of_packed_layers(layout: Layout, bits: int, symmetric: bool) -> None:
    size = 16 if layout == "plain" else 64
    if layout != "plain" and bits == 8:
        return
    model = nn.Sequential(nn.Linear(128, 48))
    model = pack_model(model, quantise(model, Recipe(grid=Uniform(bits=bits, symmetric=symmetric), group_size=size)))
    x = torch.randn(3, 128)
    y = model(x)
    to_torchao(model, layout=layout)
    assert type(model[0]) is nn.Linear
    assert repr(model)
    if layout == "packed":  # its product needs a GPU; from_torchao reads by the formula that mslk's packing has
        weight: Any = model[0].weight
        low, high = weight.qdata & 15, weight.qdata >> 4 & 15
        codes = torch.stack([low, high], -1).flatten(1)
        codes = torch.where(codes > 7, codes.int() - 16, codes.int())
        wide = weight.scale.T.repeat_interleave(size, 1) * codes + weight.zero_point.T.repeat_interleave(size, 1)
        torch.testing.assert_close(x @ wide.T + model[0].bias, y, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-5)


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("shift", [0.0, 10.0])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_there_and_back_is_the_same_layer(bits: int, symmetric: bool, shift: float, layout: Layout) -> None:
    if layout == "packed" and bits == 8:
        return
    before, model = packed(bits, symmetric=symmetric, shift=shift), packed(bits, symmetric=symmetric, shift=shift)
    back = from_torchao(to_torchao(model, layout=layout))
    assert [type(m) for m in back] == [type(m) for m in before]
    for mine, other in zip(dense(back), dense(before), strict=True):
        bound = 0.0 if symmetric else 8 * EPSILON[torch.float32] * other.abs().max()
        assert (mine - other).abs().max() <= bound
    if symmetric:
        mine, other = states(back), states(before)
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[k], other[k]) for k in mine)


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int8, groups", "int4", "int4, asymmetric"])
def test_what_torchao_has_quantised_is_read_code_for_code(kind: str) -> None:
    """With the codes -8 and -128 too, which zoo's own grids do not give."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    mapping = MappingType.ASYMMETRIC if "asymmetric" in kind else MappingType.SYMMETRIC
    config: Any = {
        "int8": lambda: Int8WeightOnlyConfig(set_inductor_config=False),
        "int8, groups": lambda: Int8WeightOnlyConfig(granularity=PerGroup(16), set_inductor_config=False),
    }.get(kind, lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16), mapping_type=mapping))()
    model = network()
    model[0].weight.data[0, 0] = -9.0  # the end of its group
    quantize_(model, config)
    values = [m.weight.dequantize() for m in model if isinstance(m, nn.Linear)]
    x = torch.randn(5, 64)
    y = model(x)
    from_torchao(model)
    assert [type(m).__name__ for m in model] == ["PackedLinear", "GELU", "PackedLinear"]
    for mine, other in zip(dense(model), values, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0 if kind == "int4" else 1e-6)
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-4)


@needs_torchao
def test_the_rounding_of_inputs_stays_and_hooks_are_refused() -> None:
    """As pack_model has it: what a layer does besides is neither dropped nor lost."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, x = network(), torch.randn(5, 64)
    layers = zeroquant(model, inputs=Uniform(bits=3), group_size=16)
    wanted, plain = model(x), quantise(network(), Recipe(grid=Uniform(bits=8), group_size=16))
    assert (to_torchao(network(), plain)(x) - wanted).abs().max() > 0.01, "it would be seen"
    for made in (copy.deepcopy(model), pack_model(copy.deepcopy(model), layers)):
        found = to_torchao(made, None if isinstance(made[0], PackedLinear) else layers)
        torch.testing.assert_close(found(x), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(from_torchao(found)(x), wanted, rtol=1e-4, atol=1e-5)
    model = network()
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ValueError, match="0 is a Linear with hooks, which the layer in its place has not"):
        to_torchao(model, plain)
    quantize_(model, Int8WeightOnlyConfig(version=2))
    with pytest.raises(ValueError, match="0 is a Linear with hooks, which the layer in its place has not"):
        from_torchao(model)
    assert not any(isinstance(module, PackedLinear) for module in model)


@needs_torchao
def test_a_fused_encoder_layer_goes_there_and_back() -> None:
    """Hooks that keep the fused kernels off are none of the user's."""
    model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    layers = quantise(model, Recipe(grid=Uniform(bits=8), group_size=16))
    x, model = torch.randn(2, 3, 32), pack_model(model, layers)  # type: ignore[assignment]
    wanted = model(x)
    for _ in range(2):
        model = to_torchao(model)  # type: ignore[assignment]
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
        model = from_torchao(model)  # type: ignore[assignment]
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


@needs_torchao
@pytest.mark.slow
def test_what_rounds_inputs_too_and_what_is_in_another_order_is_refused() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = network()
    quantize_(model, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    with pytest.raises(ValueError, match=r"0 has a Int8Tensor in blocks .* rounds or scales inputs too"):
        from_torchao(model)
    other = nn.Sequential(nn.Linear(64, 48))
    other = to_torchao(pack_model(other, quantise(other, Recipe(group_size=32))), layout="cpu")
    with pytest.raises(ValueError, match=r"0 has a weight of Int4OpaqueTensor, whose codes are not read"):
        from_torchao(other)


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_files_have_no_pickles_and_are_read_on_meta(tmp_path: Path, layout: Layout) -> None:
    before, file = packed(), tmp_path / "model.safetensors"
    model = to_torchao(packed(), layout=layout)
    save_torchao(model, file)
    assert list(tmp_path.iterdir()) == [file]
    with torch.device("meta"):
        empty = network()
    back = from_torchao(load_torchao(empty, file))
    assert all(torch.equal(mine, other) for mine, other in zip(dense(back), dense(before), strict=True))
    code = {"plain": 1, "packed": 0.5}[layout]
    payload = file.stat().st_size - 8 - struct.unpack("<Q", file.read_bytes()[:8])[0]
    groups = (64 * 48 + 48 * 16) // 16
    assert payload == (64 * 48 + 48 * 16) * code + groups * (4 + {"plain": 1, "packed": 4}[layout]) + 48 * 4


@needs_torchao
@pytest.mark.slow
def test_files_that_are_of_something_else_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "m.safetensors"
    save_torchao(to_torchao(packed()), file)
    whole = file.read_bytes()
    other = nn.Sequential(nn.Linear(64, 40), nn.GELU(), nn.Linear(40, 16, bias=False))
    with pytest.raises(ValueError, match=r"m.safetensors is no file of torchao's weights of this model"):
        load_torchao(other, file)
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"]["0.weight"] = header["__metadata__"]["0.weight"].replace("IntxUnpacked", "Os")
    text = json.dumps(header).encode()
    for broken in (whole[:-5], whole[:100], b"", struct.pack("<Q", len(text)) + text + whole[8 + length :]):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match="is no file of torchao's weights of this model"):
            load_torchao(network(), file)
    save_file({"0.weight": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match="No tensors found"):
        load_torchao(network(), file)
    with pytest.raises(ValueError, match=r"has the tensors \['weight', 'bias'\] itself"):
        save_torchao(nn.Linear(2, 2), file)
    linear = nn.Sequential(nn.Linear(64, 48))
    with pytest.raises(ValueError, match=r"torchao writes no such file: .*Int4OpaqueTensor"):
        save_torchao(to_torchao(pack_model(linear, quantise(linear, Recipe(group_size=32))), layout="cpu"), file)
