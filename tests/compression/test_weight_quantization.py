"""Weights with few bits: what forward sees, the schedule, and what is refused."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compression.models import Words, weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.compression import CompressionScheduler, init_compression, redundancy_clean, transforms_of
from zoo.compression.quantisers import asymmetric, binary, noise, symmetric, ternary
from zoo.compression.schedule import bits_at
from zoo.compression.techniques.weight_quantization import WeightQuantizer

GROUP = "compression_training.weight_quantization.different_groups.wq1"


def linear(**options: Any) -> tuple[nn.Linear, nn.Linear, dict[str, Any]]:
    """A compressed layer, its plain twin, and the document."""
    torch.manual_seed(1)
    plain = nn.Linear(6, 4)
    config = {"seed": 7, "compression_training": {"weight_quantization": weights(**options)}}
    return init_compression(copy.deepcopy(plain), config), plain, config


def seen(layer: nn.Linear) -> Tensor:
    """The weight as forward sees it."""
    eye = torch.eye(6)
    return (layer(eye) - layer.bias).t()


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@given(
    bits=st.integers(1, 16), groups=st.sampled_from([1, 2, 3, 4, 24]), asym=st.booleans(), stochastic=st.booleans()
)  # fmt: skip
def test_forward_sees_the_quantised_weight(bits: int, groups: int, asym: bool, stochastic: bool) -> None:
    asym = asym and bits > 2
    layer, plain, _ = linear(
        start=bits, target=bits, quantize_groups=groups, rounding="stochastic" if stochastic else "nearest",
        quantization_type="asymmetric" if asym else "symmetric",
    )  # fmt: skip
    rows = plain.weight.detach().reshape(groups, -1)
    u = noise(rows, seed=7, step=0, name="weight") if stochastic else None
    if bits == 16:
        wanted = rows
    elif bits <= 2:
        wanted = (ternary if bits == 2 else binary)(rows)[0]
    else:
        wanted = (asymmetric if asym else symmetric)(rows, bits, u)[0]
    close(seen(layer), wanted.reshape(4, 6))
    assert torch.equal(layer.weight, plain.weight), "the weight itself stays"


def test_gradients_go_straight_to_the_weight() -> None:
    layer, plain, _ = linear(start=3, target=3)
    x = torch.randn(5, 6)
    layer(x).square().sum().backward()
    quantised = symmetric(plain.weight.detach().reshape(1, -1), 3)[0].reshape(4, 6).requires_grad_()
    nn.functional.linear(x, quantised, plain.bias.detach()).square().sum().backward()
    assert torch.equal(layer.weight.grad, quantised.grad)


@given(step=st.integers(0, 60), offset=st.integers(0, 9), start=st.integers(3, 16), period=st.integers(1, 4))
def test_bits_follow_the_schedule(step: int, offset: int, start: int, period: int) -> None:
    layer, plain, _ = linear(start=start, target=3, period=period, schedule_offset=offset)
    CompressionScheduler(layer).set_step(step)
    x = torch.randn(2, 6)
    bits = bits_at(step, offset=offset, start_bits=start, target_bits=3, period=period)
    if step < offset or bits == 16:
        assert torch.equal(layer(x), plain(x))
    else:
        close(seen(layer), symmetric(plain.weight.detach().reshape(1, -1), bits)[0].reshape(4, 6))


def test_mixing_grows_and_begins_anew_when_bits_fall() -> None:
    mixed = {"enabled": True, "quantize_change_ratio": 0.25}
    layer, plain, _ = linear(start=4, target=3, period=6, fp16_mixed_quantize=mixed)
    scheduler, w = CompressionScheduler(layer), plain.weight.detach()
    for step, (bits, share) in enumerate([(4, 0.25), (4, 0.5), (4, 0.75), (4, 1.0), (4, 1.0), (4, 1.0), (3, 0.25)]):
        scheduler.set_step(step)
        quantised = symmetric(w.reshape(1, -1), bits)[0].reshape(4, 6)
        close(seen(layer), share * quantised + (1 - share) * w)


def test_stochastic_rounding_draws_anew_each_step_and_the_same_when_it_is_repeated() -> None:
    layer, _, _ = linear(start=3, target=3, rounding="stochastic")
    scheduler = CompressionScheduler(layer)
    found = []
    for step in (0, 1, 0):
        scheduler.set_step(step)
        assert torch.equal(seen(layer), seen(layer))
        found.append(seen(layer))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_an_embedding_has_a_scale_for_each_row_and_its_tied_head_too() -> None:
    model = init_compression(Words(), {"compression_training": {"weight_quantization": weights("embed", target=8)}})
    table = model.embed.weight.detach()
    close(model.embed(torch.arange(12)), symmetric(table, 8)[0])
    close(model.head(torch.eye(8)), symmetric(table, 8)[0].t())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-10)])
def test_sixteen_bit_weights_are_quantised_in_fp32_and_stay_sixteen_bit(dtype: torch.dtype, tolerance: float) -> None:
    layer, _, _ = linear(start=4, target=4)
    layer.to(dtype)
    transform = transforms_of(layer)[0]
    found = transform(layer.weight)
    assert found.dtype is dtype
    wanted = symmetric(layer.weight.detach().float().reshape(1, -1), 4)[0].reshape(4, 6)
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=0)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_cleaning_writes_the_target_bits_and_gives_ordinary_modules_back(rounding: str) -> None:
    layer, plain, config = linear(start=8, target=3, rounding=rounding)
    cleaned = redundancy_clean(layer, config)
    assert cleaned is layer
    assert type(layer) is nn.Linear
    assert not transforms_of(layer)
    assert torch.equal(layer.weight, symmetric(plain.weight.detach().reshape(1, -1), 3)[0].reshape(4, 6))
    with pytest.raises(ValueError, match=r"not compressed as the configuration says: it lacks .*wq1"):
        redundancy_clean(layer, config)


def test_what_is_not_finite_is_refused_with_the_name_of_the_parameter() -> None:
    model = init_compression(Words(), {"compression_training": {"weight_quantization": weights("up")}})
    with torch.no_grad():
        model.layer[1].up.weight[2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"layer\.1\.up\.weight has elements that are infinite or NaN"):
        model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))


def test_groups_that_do_not_divide_a_weight_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"{GROUP}: quantize_groups = 5, and weight has \(4, 6\) = 24 elements"):
        linear(quantize_groups=5)


def of_size(size: int, layer: nn.Module) -> nn.Module:
    section = weights(start=4, target=4, quantize_groups=5)
    section["different_groups"]["wq1"]["params"]["group_size"] = size
    return init_compression(layer, {"compression_training": {"weight_quantization": section}})


@pytest.mark.parametrize("size", [1, 8, 24])
def test_a_group_can_have_a_size(size: int) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(6, 4)
    wanted = symmetric(layer.weight.detach().reshape(-1, size), 4, None)[0]
    close(seen(of_size(size, layer)), wanted.reshape(4, 6))  # type: ignore[arg-type]
    words = nn.Embedding(4, 6)
    wanted = symmetric(words.weight.detach().reshape(-1, size), 4, None)[0]
    close(of_size(size, words)(torch.arange(4)), wanted.reshape(4, 6))
    with pytest.raises(ValueError, match=rf"{GROUP}: params.group_size = 7, and weight has \(4, 6\) = 24 elements"):
        of_size(7, nn.Linear(6, 4))


def test_verbose_says_when_bits_change(caplog: pytest.LogCaptureFixture) -> None:
    layer, _, _ = linear(start=5, target=3, period=2, schedule_offset=1, quantize_verbose=True)
    scheduler = CompressionScheduler(layer)
    with caplog.at_level(logging.INFO, logger="zoo.compression"):
        for step in range(1, 8):
            scheduler.set_step(step)
    assert [r.getMessage() for r in caplog.records] == [
        "step 1: weight has 5 bits", "step 3: weight has 4 bits", "step 5: weight has 3 bits"
    ]  # fmt: skip


def test_an_empty_weight_is_left_alone() -> None:
    layer = init_compression(nn.Linear(0, 3), {"compression_training": {"weight_quantization": weights()}})
    assert torch.equal(layer(torch.ones(2, 0)), layer.bias.expand(2, 3))
    assert isinstance(transforms_of(layer)[0], WeightQuantizer)


@pytest.mark.matrix
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_shapes_can_be_computed_without_values(bits: int, rounding: str) -> None:
    layer, _, _ = linear(start=bits, target=bits, rounding=rounding)
    assert copy.deepcopy(layer).to("meta")(torch.empty(5, 6, device="meta")).shape == (5, 4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(torch.empty(5, 6))).shape == (5, 4)
