"""ZeroQuant in one call: rounded weights and inputs, distilled with both, and models that stay the user's."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compression.test_post_training import Model, data, distance, trained
from torch import Tensor, nn

from zoo.compression import attached_to, detach, init_compression, redundancy_clean, transforms_of
from zoo.compression.packed import PackedLinear, load_packed, pack_model, save_packed
from zoo.compression.post_training import (
    Binary,
    Floating,
    Grid,
    Inputs,
    Recipe,
    Uniform,
    gptq,
    nearest,
    quantise,
    quantise_inputs,
    zeroquant,
)  # fmt: skip
from zoo.compression.post_training.tokens import GridInput

W4A8: dict[str, Any] = {"weights": Uniform(bits=4), "group_size": 16, "leave_out": ["head"]}


def by_token(x: Tensor, grid: Grid) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    params = grid.fit(rows)
    return grid.decode(grid.encode(rows, params), params).reshape(x.shape)


@pytest.mark.parametrize("inputs", [Uniform(bits=4), Uniform(bits=8, symmetric=False), Floating(format="fp8_e4m3")])
def test_a_layer_multiplies_rounded_tokens_with_rounded_rows(inputs: Grid) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    x, exact = torch.randn(2, 5, 16), copy.deepcopy(model)
    layers = zeroquant(model, weights=Uniform(bits=4), inputs=inputs, group_size=8)
    assert set(layers) == {"0", "2"}
    h = x
    for module in exact:
        if isinstance(module, nn.Linear):
            weight = nearest(module.weight, Uniform(bits=4), group_size=8).values
            h = nn.functional.linear(by_token(h, inputs), weight, module.bias)
        else:
            h = module(h)
    # Codes of equal steps are rounded from x·(Q/max|x|), from x/s by grids: a tie may go the other way.
    assert (model(x) - h).abs().max() < 0.05
    assert (model(x) - h).abs().median() < 1e-5
    assert (model(x) - exact(x)).abs().max() > 1e-3


@pytest.mark.dear
def test_inputs_that_are_rounded_are_what_blocks_are_distilled_with() -> None:
    exact, found, rough = trained(), {}, Uniform(bits=3)
    common: dict[str, Any] = {"batches": data(), "leave_out": ["head"], "group_size": 16, "distil_lr": 1e-3}
    for name in ("nothing", "weights alone", "both"):
        model = trained()
        steps = 0 if name == "nothing" else 80
        inputs = None if name == "weights alone" else rough
        layers = zeroquant(model, weights=rough, inputs=inputs, distil_steps=steps, blocks=model.layers, **common)
        if name == "weights alone":
            quantise_inputs(model, layers, rough)
        found[name] = distance(model, exact)
        assert len(transforms_of(model)) == len(layers) == 6
    assert found["both"] < 0.9 * found["weights alone"], found
    assert found["weights alone"] < found["nothing"], found


def test_gptq_sees_rounded_inputs() -> None:
    model, other = trained(), trained()
    rough = Floating(format="fp4_e2m1", power_of_two=True)
    recipe = Recipe(grid=Uniform(bits=3), inputs=rough, group_size=16, method="gptq", leave_out=["head"])
    quantise(model, recipe, blocks=model.layers, batches=data())
    inputs = Inputs(16)
    for x in data():
        inputs.add(by_token(other.embed(x), rough))
    wanted = gptq(other.layers[0].up.weight, inputs.hessian, Uniform(bits=3), group_size=16)
    assert torch.equal(model.layers[0].up.weight, wanted.values)


def test_a_model_stays_the_users(tmp_path: Path) -> None:
    model = trained()
    names, kinds = list(model.state_dict()), [type(m).__name__ for m in model.modules()]
    layers = zeroquant(model, blocks=model.layers, batches=data(1), distil_steps=2, low_rank=2, **W4A8)
    assert list(model.state_dict()) == names
    assert [type(m).__name__ for m in model.modules()] == kinds
    assert all(layer.low_rank is not None for layer in layers.values())
    x = data(1)[0]
    with torch.no_grad():
        wanted = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(x), wanted)
        fresh = trained(seed=5)
        quantise_inputs(fresh, layers, Uniform(bits=8))
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(fresh(x), wanted)
        packed = pack_model(copy.deepcopy(model), layers)
        assert isinstance(packed.layers[1].up, PackedLinear)  # type: ignore[index,union-attr]
        assert len(transforms_of(packed)) == 6
        torch.testing.assert_close(packed(x), wanted, rtol=1e-4, atol=1e-4)
        save_packed(packed, tmp_path / "model.safetensors")
        again = trained(seed=6)
        quantise_inputs(again, layers, Uniform(bits=8))
        assert torch.equal(load_packed(again, tmp_path / "model.safetensors")(x), packed(x))
    detach(model)
    assert not attached_to(model.layers[0].up)


def test_it_is_pruned_and_cleaned_as_any_model() -> None:
    model = trained()
    zeroquant(model, **W4A8)
    section = {
        "compression_training": {
            "sparse_pruning": {
                "shared_parameters": {"enabled": True, "method": "l1"},
                "different_groups": {"all": {"params": {"dense_ratio": 0.5}, "modules": ["up"]}},
            }
        }
    }
    redundancy_clean(init_compression(model, section), section)
    assert float((model.layers[0].up.weight == 0).float().mean()) >= 0.5
    assert {t.site.where for t in transforms_of(model)} == {"input"}
    assert len(transforms_of(model)) == 6


@pytest.mark.parametrize(("name", "far"), [("fp8_e4m3", 0.03), ("fp6_e3m2", 0.1), ("fp4_e2m1", 0.25)])
def test_floating_grids_with_scales_that_are_powers_of_two(name: str, far: float) -> None:
    exact, model = trained(), trained()
    grid = Floating(format=name, power_of_two=True)
    layers = zeroquant(model, weights=grid, inputs=Floating(format="fp8_e4m3"), group_size=16)
    for layer in layers.values():
        (scale,) = layer.quantised.params
        assert torch.equal(scale.log2(), scale.log2().round())
    assert all(isinstance(t, GridInput) for t in transforms_of(model))
    assert 0 < distance(model, exact) < far


def test_odd_inputs() -> None:
    layer = nn.Linear(4, 2, bias=False)
    (transform,) = quantise_inputs(layer, [""], Floating(format="fp8_e4m3"))
    assert layer(torch.zeros(0, 4)).shape == (0, 2)
    assert torch.equal(layer(torch.zeros(1, 4)), torch.zeros(1, 2))
    both = layer(torch.tensor([[torch.nan, 1, 1, 1], [1.0, 1, 1, 1]]))
    assert both[0].isnan().all()
    assert both[1].isfinite().all()
    assert not layer(torch.tensor([[torch.inf, 1, 1, 1]])).isfinite().any()
    x = torch.randn(3, 4, requires_grad=True)
    transform(x).sum().backward()
    assert torch.equal(torch.as_tensor(x.grad), torch.ones(3, 4))


def test_what_fails_leaves_no_transforms() -> None:
    model = trained()
    with pytest.raises(ValueError, match=r"in the order \[2, 1, 0\]"):
        zeroquant(model, blocks=list(model.layers)[::-1], batches=data(1), **W4A8)
    assert not transforms_of(model)
    quantise_inputs(model, ["layers.2.up"], Uniform(bits=8))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"layers\.2\.up:input is changed twice in one way"):
        zeroquant(model, **W4A8)
    assert len(transforms_of(model)) == 1
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    detach(model)
    with torch.no_grad():
        model.layers[1].up.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        zeroquant(model, **W4A8)
    assert not transforms_of(model)


def test_what_cannot_have_rounded_inputs_or_codes() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 32)
    with pytest.raises(ValueError, match=r"self_attn\.out_proj is never called: nn\.MultiheadAttention computes with"):
        quantise_inputs(encoder, ["self_attn.out_proj"], Uniform(bits=8))
    assert zeroquant(encoder, group_size=16).keys() == {"linear1", "linear2"}
    section = {"shared_parameters": {"enabled": True}, "different_groups": {"a": {"modules": ["up"]}}}
    rounded = init_compression(Model(), {"compression_training": {"weight_quantization": section}})
    layers = quantise(Model(), Recipe(grid=Uniform(bits=4), group_size=16))
    with pytest.raises(ValueError, match=r"layers\.0\.up has a transform on its weight, and codes have none"):
        pack_model(rounded, layers)


def test_layers_with_other_grids_take_another_call() -> None:
    """W4 in one place and W8 in another, as ZeroQuant has them."""
    model, exact = trained(), trained()
    common: dict[str, Any] = {"blocks": model.layers, "batches": data(2), "distil_steps": 3, "group_size": 16}
    four = zeroquant(model, weights=Uniform(bits=4), leave_out=["down", "head"], **common)
    before = {name: model.get_parameter(f"{name}.weight").clone() for name in four}
    eight = zeroquant(model, weights=Uniform(bits=8), leave_out=["up", "head"], **common)
    assert {name.rpartition(".")[2] for name in four} == {"up"}
    assert {name.rpartition(".")[2] for name in eight} == {"down"}
    assert all(torch.equal(model.get_parameter(f"{name}.weight"), value) for name, value in before.items())
    assert len(transforms_of(model)) == 6
    assert distance(model, exact) < 0.5


def test_binary_weights_are_a_grid_too() -> None:
    model = trained()
    zeroquant(model, weights=Binary(), group_size=0, inputs=None)
    assert len(model.layers[0].up.weight[0].unique()) == 2
    assert not transforms_of(model)
