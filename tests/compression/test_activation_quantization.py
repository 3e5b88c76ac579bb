"""Inputs with few bits: ranges of tokens and images, ranges that are learned, and who learns them when."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compression.models import inputs
from torch import Tensor, nn

from zoo import sim
from zoo.comm import Communicator
from zoo.compression import CompressionScheduler, init_compression, transforms_of
from zoo.compression.quantisers import asymmetric, symmetric
from zoo.compression.techniques.activation_quantization import StaticInputQuantizer


def compressed(module: nn.Module, **options: Any) -> Any:
    return init_compression(
        copy.deepcopy(module), {"compression_training": {"activation_quantization": inputs(**options)}}
    )


class Identity(nn.Linear):
    """A linear layer that returns what it was called with."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x


class ImageIdentity(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x


@given(bits=st.integers(2, 15), asym=st.booleans(), seed=st.integers(0, 99))
def test_dynamic_ranges_are_those_of_tokens_and_of_images(bits: int, asym: bool, seed: int) -> None:
    kind, quantise = ("asymmetric", asymmetric) if asym else ("symmetric", symmetric)
    dice = torch.Generator().manual_seed(seed)
    options = {"bits": bits, "quantization_type": kind, "range_calibration": "dynamic"}
    tokens = torch.randn(2, 4, 3, generator=dice)
    found = compressed(Identity(), **options)(tokens)
    assert torch.equal(found, quantise(tokens.reshape(8, 3), bits)[0].reshape(2, 4, 3))
    images = torch.randn(3, 2, 2, 2, generator=dice)
    found = compressed(ImageIdentity(), **options)(images)
    assert torch.equal(found, quantise(images.reshape(3, 8), bits)[0].reshape(3, 2, 2, 2))


def test_before_the_offset_nothing_happens() -> None:
    layer = compressed(Identity(), bits=3, range_calibration="dynamic", schedule_offset=2)
    x = torch.randn(2, 3, requires_grad=True)
    assert layer(x) is x
    CompressionScheduler(layer).set_step(2)
    y = layer(x)
    assert not torch.equal(y, x)
    factor = torch.randn(2, 3)
    (y * factor).sum().backward()
    assert torch.equal(x.grad, factor)


def test_off_and_empty() -> None:
    x = torch.randn(2, 3)
    assert compressed(Identity(), bits=32, range_calibration="dynamic")(x) is x
    assert compressed(Identity(), bits=16)(x) is x
    assert compressed(Identity(), bits=4, range_calibration="dynamic")(torch.empty(0, 3)).shape == (0, 3)


@given(offset=st.integers(0, 3), asym=st.booleans(), seed=st.integers(0, 99))
def test_a_static_range_follows_what_training_has_seen(offset: int, asym: bool, seed: int) -> None:
    kind = "asymmetric" if asym else "symmetric"
    layer = compressed(Identity(), bits=4, schedule_offset=offset, quantization_type=kind)
    scheduler, dice = CompressionScheduler(layer), np.random.default_rng(seed)
    ends: Any = None
    for step in range(6):
        batches = [torch.tensor(dice.normal(size=(2, 3)), dtype=torch.float32) for _ in range(2)]
        for x in batches:
            y = layer.train()(x)
            if step < offset or ends is None:
                assert torch.equal(y, x)
            else:
                low, high = ends if asym else (-np.abs(ends).max(), np.abs(ends).max())
                assert y.min() >= low - 1e-6
                assert y.max() <= high + 1e-6
                inside = (x > low) & (x < high)
                unit = (high - low) / (15 if asym else 14)
                assert (y - x)[inside].abs().max() <= unit / 2 + 1e-6 if inside.any() else True
            layer.eval()(x * 100)  # evaluation moves nothing
        scheduler.step()
        now = np.array([min(x.min().item() for x in batches), max(x.max().item() for x in batches)])
        ends = now if ends is None else 0.95 * ends + 0.05 * now
        np.testing.assert_allclose(transforms_of(layer)[0].range, ends, rtol=1e-5)


def test_a_skipped_step_and_what_is_not_finite_move_no_range() -> None:
    layer = compressed(Identity(), bits=4).train()
    scheduler = CompressionScheduler(layer)
    transform = transforms_of(layer)[0]
    assert isinstance(transform, StaticInputQuantizer)
    layer(torch.tensor([[-1.0, 0.0, 2.0]]))
    scheduler.step()
    before = transform.range
    assert before is not None
    for bad in (float("inf"), float("nan")):
        layer(torch.tensor([[bad, 0.0, 1.0]]))
        scheduler.step()
        assert transform.range is not None
        assert transform.range.tolist() == before.tolist() == [-1.0, 2.0]
    layer(torch.tensor([[-9.0, 0.0, 9.0]]))
    scheduler.step(skipped=True)
    scheduler.step()  # nothing was called in this one
    assert transform.range.tolist() == [-1.0, 2.0]


def test_ranks_have_one_range_and_go_on_with_it_from_a_saved_state() -> None:
    def job(rank: int) -> tuple[list[float], Any]:
        layer = compressed(Identity(), bits=4).train()
        scheduler = CompressionScheduler(layer, Communicator())
        layer(torch.tensor([[-1.0 - rank, 0.0, 3.0 - rank]]))
        scheduler.step()
        return transforms_of(layer)[0].range.tolist(), scheduler.state_dict()

    found = sim.run(3, job)
    assert [ends for ends, _ in found] == [[-3.0, 3.0]] * 3
    other = compressed(Identity(), bits=4)
    CompressionScheduler(other).load_state_dict(found[0][1])
    assert transforms_of(other)[0].range.tolist() == [-3.0, 3.0]
    with pytest.raises(ValueError, match=r"compression states of :input/activation_quantization"):
        CompressionScheduler(nn.Linear(2, 2)).load_state_dict(found[0][1])
    with pytest.raises(ValueError, match=r"the keys \['step'\]; it wants steps and transforms"):
        CompressionScheduler(other).load_state_dict({"step": 3})


def test_modules_without_inputs_of_floating_point_are_no_sites() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    names = [t.site.name for t in transforms_of(compressed(model))]
    assert names == ["1:input"]
    with pytest.raises(
        ValueError, match=r"the pattern '\^0\$' matches only what cannot be compressed so \(Embedding\)"
    ):
        init_compression(model, {"compression_training": {"activation_quantization": inputs("^0$")}})
