"""Beside the counters of torch and DeepSpeed: equal where they count, and what they leave out is named."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.profiling import peers
from tests.profiling.test_counts import Calls, profiled
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zoo.profiling import get_model_profile

PEER = json.loads(peers.FILE.read_text())["models"]
RECURRENT = {"LSTM": 3 * 2 * 28 * (6 + 7 + 7 + 7), "GRU": 3 * 2 * 21 * (6 + 7)}
"""Both are 0 multiply-accumulates to DeepSpeed 0.19.8, which has estimates of FLOPs for them alone."""
ELEMENTWISE = 0.05
"""Part of its FLOPs that elementwise operations are, which ours are apart: most in models as small as these."""


_LARGE = [name for name in peers.MODELS if name.split(",")[0] in ("GPT-2", "Llama", "BERT")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in _LARGE else ()) for name in peers.MODELS]
)
def test_multiply_accumulates_and_parameters_are_deepspeeds(name: str) -> None:
    if name in _LARGE:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, call = peers.MODELS[name]()
    found = get_model_profile(model.eval(), **call, print_profile=False, as_string=False)
    theirs = PEER[name]
    assert found[1] == RECURRENT.get(name, theirs["macs"])
    assert found[2] == theirs["params"]
    if name not in RECURRENT:
        assert 0 <= theirs["flops"] - found[0] <= max(ELEMENTWISE * theirs["flops"], _biases(model, call))


def _biases(model: nn.Module, call: dict[str, Any]) -> int:
    """Elementwise operations of the model."""
    found = profiled(model, *call.get("args", []), **call.get("kwargs", {}))
    return found.model.forward.elementwise


def torchs(function: Any, *args: Any) -> tuple[int, int]:
    """FLOPs of forward, and of both passes."""
    with FlopCounterMode(display=False) as counter:
        out = function(*args)
        forward = counter.get_total_flops()
        out.square().sum().backward()
    return forward, counter.get_total_flops()


@examples(times=0.5, quick=2)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(1, 5), st.booleans(), st.booleans(),
)  # fmt: skip
def test_perceptrons_are_torchs(widths: list[int], rows: int, biased: bool, grad: bool) -> None:
    pairs = itertools.pairwise(widths)
    net = nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair, bias=biased), nn.SiLU())))
    x = torch.randn(rows, widths[0], requires_grad=grad)
    found = profiled(net, x, backward=True).model
    assert (found.forward.flops, found.forward.flops + found.backward.flops) == torchs(net, x)


@examples(times=0.5, quick=2)
@given(
    dims=st.integers(1, 3), groups=st.integers(1, 3), channels=st.integers(1, 2), kernel=st.integers(1, 3),
    stride=st.integers(1, 2), padding=st.integers(0, 2), transposed=st.booleans(), bias=st.booleans(),
)  # fmt: skip
def test_convolutions_are_torchs(
    dims: int, groups: int, channels: int, kernel: int, stride: int, padding: int, transposed: bool, bias: bool
) -> None:
    kinds = (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        if transposed
        else (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    )
    layer = kinds[dims - 1](
        groups * channels, groups * 2, kernel, stride=stride, padding=min(padding, kernel - 1), groups=groups, bias=bias
    )  # fmt: skip
    x = torch.randn(2, groups * channels, *[6] * dims, requires_grad=True)
    found = profiled(layer, x, backward=True).model
    forward, both = torchs(layer, x)
    assert found.forward.flops == forward
    if groups == 1:  # torch takes the gradient of a grouped weight for that of a whole one
        assert found.forward.flops + found.backward.flops == both


@examples(times=0.5, quick=2)
@given(
    batch=st.integers(1, 2), heads=st.integers(1, 3), queries=st.integers(1, 6), keys=st.integers(1, 6),
    size=st.integers(1, 9), causal=st.booleans(),
)  # fmt: skip
def test_attention_is_torchs(batch: int, heads: int, queries: int, keys: int, size: int, causal: bool) -> None:
    q = torch.randn(batch, heads, queries, size, requires_grad=True)
    k, v = (torch.randn(batch, heads, keys, size, requires_grad=True) for _ in range(2))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    found = profiled(Calls(attend), q, k, v, backward=True).model
    forward, both = torchs(attend, q, k, v)
    assert found.forward.flops == forward
    # torch has what the kernel computes again among backward.
    assert found.forward.flops + found.backward.flops + found.recomputation.flops == both
