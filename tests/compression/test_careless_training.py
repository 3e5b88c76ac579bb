"""Compression while training, given models and configurations that it was not made for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.compression.models import Words, document, inputs, start, train, weights
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call, grad, vmap

from zoo import sim
from zoo.compression import CompressionScheduler, init_compression, redundancy_clean
from zoo.compression.quantisers import symmetric

NAMES = ["weights", "inputs", "elements", "elements, learned", "rows", "rows, learned"]


def config(name: str) -> dict[str, Any]:
    def masks(technique: str, method: str, related: Any = None) -> dict[str, Any]:
        group = {"params": {"dense_ratio": 0.5}, "modules": ["0"], **({"related_modules": related} if related else {})}
        return {technique: {"shared_parameters": {"enabled": True, "method": method}, "different_groups": {"g": group}}}

    method = "topk" if name.endswith("learned") else "l1"
    section = {
        "weights": lambda: {"weight_quantization": weights("*", start=4, target=4)},
        "inputs": lambda: {"activation_quantization": inputs("*", bits=8, range_calibration="dynamic")},
        "elements": lambda: masks("sparse_pruning", method),
        "rows": lambda: masks("row_pruning", method, [["2"]]),
    }[name.partition(",")[0]]()
    return {"compression_training": section}


def network(wide: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, wide), nn.ReLU(), nn.Linear(wide, 4))


@pytest.mark.parametrize("name", NAMES)
def test_shapes_without_values_go_through_and_are_not_cleaned(name: str) -> None:
    """On "meta" no mask is made, so that none is kept when values come."""
    model = init_compression(network().to("meta"), config(name))
    assert model(torch.empty(2, 16, device="meta")).shape == (2, 4)
    with pytest.raises(ValueError, match=r'0.weight is on "meta" and has no values to clean'):
        redundancy_clean(copy.deepcopy(model), config(name))
    state = {key: value.detach() for key, value in init_compression(network(), config(name)).state_dict().items()}
    model.load_state_dict(state, assign=True)
    x = torch.randn(2, 16)
    assert torch.equal(model(x), init_compression(network(), config(name))(x))


@pytest.mark.parametrize("name", ["elements", "rows"])
def test_fake_tensors_go_through(name: str) -> None:
    with FakeTensorMode():
        assert init_compression(network(), config(name))(torch.empty(2, 16)).shape == (2, 4)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("name", NAMES)
def test_layers_without_rows_and_inputs_without_rows(name: str) -> None:
    for wide, rows in ((0, 3), (32, 0)):
        model = init_compression(network(wide), config(name))
        scheduler = CompressionScheduler(model)
        for _ in range(2):
            model(torch.randn(rows, 16)).sum().backward()
            scheduler.step()
        scheduler.state_dict()
        assert redundancy_clean(model, config(name))(torch.randn(3, 16)).shape == (3, 4)


@pytest.mark.parametrize("name", NAMES)
def test_torch_func_takes_gradients(name: str) -> None:
    model, x = init_compression(network(), config(name)), torch.randn(3, 16)
    model(x).square().sum().backward()
    values = {key: value.detach() for key, value in model.named_parameters()}

    def loss(values: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, values, (x,)).square().sum()

    for key, value in grad(loss)(values, x).items():
        torch.testing.assert_close(value, model.get_parameter(key).grad)
    if name.endswith("learned"):  # of each sample: masks of weights do not depend on it
        each = vmap(grad(loss), (None, 0))(values, x)
        torch.testing.assert_close(each["0.weight"].sum(0), model[0].weight.grad)


def test_one_image_without_a_batch_has_one_range() -> None:
    model = init_compression(nn.Sequential(nn.Conv2d(3, 4, 3)), config("inputs"))
    x = torch.randn(3, 5, 5) * torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    assert torch.equal(model(x), model(x[None])[0])
    rounded = symmetric(x.reshape(1, -1), 8)[0].view_as(x)
    torch.testing.assert_close(model(x), nn.functional.conv2d(rounded, model[0].weight, model[0].bias))


def replaced(document: dict[str, Any], technique: str, place: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(document)
    there = found["compression_training"][technique]
    for key in place[:-1]:
        there = there[key]
    there[place[-1]] = value
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "technique", "place", "value"),
    [
        ("weights", "weight_quantization", ("different_groups", "wq1", "params", "target_bits"), 3),
        ("weights", "weight_quantization", ("shared_parameters", "quantize_groups"), 2),
        ("rows", "row_pruning", ("different_groups", "g", "params", "dense_ratio"), 0.25),
        ("rows", "row_pruning", ("different_groups", "g", "related_modules"), None),
        ("rows", "row_pruning", ("shared_parameters", "schedule_offset"), 9),
    ],
)
def test_cleaning_by_another_configuration_is_refused(name: str, technique: str, place: Any, value: Any) -> None:
    """A model is what it was compressed as; another configuration would be passed over."""
    model = init_compression(network(), config(name))
    sentence = rf"the model was compressed with compression_training.{technique}.{'.'.join(place)} = "
    with pytest.raises(ValueError, match=sentence):
        redundancy_clean(model, replaced(config(name), technique, place, value))
    redundancy_clean(model, config(name))


def test_what_is_only_said_in_the_log_may_be_another() -> None:
    model = init_compression(network(), config("weights"))
    place = ("shared_parameters", "quantize_verbose")
    redundancy_clean(model, replaced(config("weights"), "weight_quantization", place, True))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("bits", [4, None])
def test_what_one_rank_has_compressed_otherwise_is_told_on_all(named: bool, bits: int | None) -> None:
    """Nobody waits for it. ``bits`` None: it has called no init_compression, which the engine then does for it, but for
    a mesh, where ranks agree on what patterns mean before."""
    wanted = {"weight_quantization": weights(start=8, target=8)}

    def job(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",)) if named else None
        model = Words()
        if rank == 0:
            init_compression(model, {"compression_training": wanted})
        elif bits is not None:
            init_compression(model, {"compression_training": {"weight_quantization": weights(start=8, target=bits)}})
        if bits is None and not named:
            return train(start(document(0, compression=wanted), model), 1)
        with pytest.raises(ValueError, match=r"rank 1: the model (was compressed with|is not compressed as)"):
            start(document(0, compression=wanted), model, mesh=mesh)
        return []

    first, second = sim.run(2, job)
    assert first == second
