"""FLOPs of layers and small models, equal to integers that are derived by hand."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zoo.cost import operators
from zoo.profiling import FlopsProfiler, Profile, get_model_profile


def profiled(model: nn.Module, *args: Any, backward: bool = False, **kwargs: Any) -> Profile:
    """Of one call; of its backward too."""
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    out = model(*args, **kwargs)
    if backward:
        (out[0] if isinstance(out, tuple) else out).float().square().sum().backward()
    profiler.stop_profile()
    found = profiler.profile
    profiler.end_profile()
    assert found.not_counted == {}
    return found


class Calls(nn.Module):
    """A module that is a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def macs_of(function: Any, *args: Any, **kwargs: Any) -> int:
    return profiled(Calls(function), *args, **kwargs).model.forward.macs


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    torch.manual_seed(0)
    return


def test_a_perceptron_forward_and_backward() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    found = profiled(net, torch.randn(5, 8), backward=True)
    assert found.model.forward.flops == 2 * 5 * (8 * 16 + 16 * 4)
    # Both weights, and the input of the second: the first layer's input needs no gradient.
    assert found.model.backward.flops == 2 * 5 * (8 * 16 + 2 * 16 * 4)
    assert found.model.recomputation.flops == 0
    assert found.model.forward.elementwise == 5 * (16 + 16 + 4), "biases and ReLU"
    first = found.module("0").forward
    assert first.read_bytes == 4 * (5 * 8 + 8 * 16 + 16)
    assert first.written_bytes == 4 * 5 * 16
    by_size = operators.matrix_product(5, 8, 16, bias=True, itemsize=4)
    assert first == by_size


@pytest.mark.parametrize("inference", [False, True])
def test_products_of_every_shape(inference: bool) -> None:
    cases = [
        (torch.matmul, (8,), (8,), 8),
        (torch.matmul, (4, 8), (8,), 32),
        (torch.matmul, (8,), (8, 5), 40),
        (torch.matmul, (2, 1, 4, 8), (3, 8, 5), 6 * 4 * 8 * 5),
        (torch.mm, (4, 8), (8, 5), 160),
        (torch.bmm, (3, 4, 8), (3, 8, 5), 480),
        (torch.outer, (4,), (5,), 0),
        (F.linear, (2, 3, 8), (5, 8), 240),
    ]
    with torch.inference_mode(inference):
        for function, left, right, macs in cases:
            assert macs_of(function, torch.randn(left), torch.randn(right)) == macs, (function, left, right)
        assert macs_of(torch.addmm, torch.randn(5), torch.randn(4, 8), torch.randn(8, 5)) == 160
        assert macs_of(torch.baddbmm, torch.randn(5), torch.randn(2, 4, 8), torch.randn(2, 8, 5)) == 320
        einsum = functools.partial(torch.einsum, "bik,bkj->bij")
        assert macs_of(einsum, torch.randn(2, 3, 4), torch.randn(2, 4, 5)) == 120
        complex_ = torch.randn(4, 8, dtype=torch.complex64)
        assert macs_of(torch.mm, complex_, complex_.t()) == 4 * 4 * 8 * 4, "a complex product is four real ones"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_attention_dense_and_causal(is_causal: bool, grad: bool) -> None:
    q = torch.randn(2, 4, 16, 8, requires_grad=grad)
    k, v = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 16, 8)
    net = Calls(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal))
    found = profiled(net, q, k, v, backward=grad).model
    assert found.forward.flops == 2 * 2 * 4 * 16 * 16 * 8 * 2 == 65536
    seen = 16 * 17 // 2 if is_causal else 16 * 16
    assert found.forward.causal_flops == 2 * 2 * 4 * seen * 16
    if grad:
        assert found.backward.flops == 2 * found.forward.flops
        assert found.recomputation.flops == found.forward.flops // 2, "the kernel makes the scores again"


def test_attention_written_out_is_as_much_as_the_fused_one() -> None:
    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v

    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    written = profiled(Calls(eager), q, k, v, backward=True).model
    fused = profiled(Calls(F.scaled_dot_product_attention), q, k, v, backward=True).model
    assert (written.forward.flops, written.backward.flops) == (fused.forward.flops, fused.backward.flops)
    assert written.recomputation.flops == 0 < fused.recomputation.flops


def test_distances_of_many_points_are_a_product() -> None:
    """Of 2 · 40 by 30 points of 5 numbers, their norms in two places more; back come two products."""
    x, y = (torch.randn(2, n, 5, requires_grad=True) for n in (40, 30))
    found = profiled(Calls(torch.cdist), x, y, backward=True).model
    assert found.forward.flops == 2 * 2 * 40 * 30 * 7
    assert found.forward.elementwise == 3 * x.numel() + 2 * y.numel() + 2 * 2 * 40 * 30
    assert found.backward.flops == 2 * 2 * 2 * 40 * 30 * 5


def test_convolutions_plain_grouped_transposed_in_one_to_three_dims() -> None:
    # (layer, input, output positions or, transposed, input positions, weights)
    cases: list[tuple[nn.Module, tuple[int, ...], int, int]] = [
        (nn.Conv1d(4, 6, 3), (2, 4, 10), 8, 4 * 6 * 3),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 8, 8), 16, 4 * 6 * 9),
        (nn.Conv2d(4, 8, 3, groups=2, dilation=2), (2, 4, 8, 8), 16, 4 * 8 // 2 * 9),
        (nn.Conv2d(4, 4, 3, groups=4, bias=False), (2, 4, 8, 8), 36, 4 * 9),
        (nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4), 27, 2 * 3 * 8),
        (nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 8, 8), 64, 4 * 4 * 9),
        (nn.ConvTranspose1d(4, 8, 3), (2, 4, 8), 8, 4 * 8 * 3),
    ]
    for layer, shape, positions, weights in cases:
        x = torch.randn(shape, requires_grad=True)
        found = profiled(layer, x, backward=True).model
        assert found.forward.macs == 2 * positions * weights, layer
        assert found.backward.macs == 2 * found.forward.macs, layer
        assert (layer.bias is None) or found.forward.elementwise == layer(x).numel()
    unbatched = profiled(nn.Conv2d(4, 6, 3), torch.randn(4, 8, 8)).model
    assert unbatched.forward.macs == 36 * 4 * 6 * 9


@pytest.mark.parametrize("device", ["cpu", pytest.param("meta", marks=pytest.mark.slow)])
def test_recurrent_layers_and_cells(device: str) -> None:
    x = torch.randn(3, 2, 6, device=device)  # 3 steps of 2 sequences
    with torch.device(device):
        lstm, gru = nn.LSTM(6, 7, 2, bidirectional=True), nn.GRU(6, 7)
        rnn, projected = nn.RNN(6, 7), nn.LSTM(6, 7, proj_size=3)
        cell = nn.LSTMCell(6, 7)
    assert profiled(lstm, x).model.forward.macs == 6 * 2 * 28 * ((6 + 7) + (14 + 7))
    assert profiled(gru, x).model.forward.macs == 6 * 21 * 13
    assert profiled(rnn, x).model.forward.macs == 6 * 7 * 13
    assert profiled(projected, x).model.forward.macs == 6 * (28 * (6 + 3) + 7 * 3)
    assert profiled(cell, x[0]).model.forward.macs == 2 * 28 * 13


def test_gradients_of_an_lstm() -> None:
    lstm = nn.LSTM(6, 7)
    x = torch.randn(3, 2, 6, requires_grad=True)
    found = profiled(lstm, x, backward=True).model
    assert found.backward.macs == 2 * found.forward.macs == 2 * 6 * 28 * 13


@pytest.mark.parametrize("fast", [False, True])
def test_multi_head_attention_in_evaluation(fast: bool) -> None:
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 5, 16)
    encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    attended = 4 * 10 * 16 * 16 + 2 * 4 * 5 * 5 * 4 * 2
    with torch.set_grad_enabled(not fast):
        found = profiled(layer, x, x, x)
        whole = profiled(encoder, x)
    assert found.model.forward.macs == attended
    assert whole.model.forward.macs == attended + 2 * 10 * 16 * 32
    assert ("aten::_native_multi_head_attention" in found.operators) == fast, "the path that was meant"
    assert ("aten::_transformer_encoder_layer_fwd" in whole.operators) == fast


def test_grouped_products_count_the_rows_that_are_used() -> None:
    x, w = torch.randn(10, 16, dtype=torch.bfloat16), torch.randn(3, 16, 8, dtype=torch.bfloat16)
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)
    assert macs_of(torch._grouped_mm, x, w, offs) == 7 * 16 * 8
    assert macs_of(torch._grouped_mm, x.to("meta"), w.to("meta"), offs.to("meta")) == 10 * 16 * 8, "all, by shape"
    left, right = torch.randn(16, 8, dtype=torch.bfloat16), torch.randn(8, 16, dtype=torch.bfloat16)
    assert macs_of(torch._grouped_mm, left, right, torch.tensor([3, 8], dtype=torch.int32)) == 16 * 8 * 16


def test_embeddings_compute_nothing_and_read_what_they_return() -> None:
    found = profiled(nn.Embedding(1000, 8), torch.tensor([1, 2, 3])).model.forward
    assert (found.flops, found.elementwise) == (0, 0)
    assert (found.read_bytes, found.written_bytes) == (3 * 8 * 4 + 3 * 8, 3 * 8 * 4)


def test_elementwise_operations_are_apart_and_integers_are_none() -> None:
    found = profiled(Calls(lambda x, y: (x + y).softmax(-1)), torch.randn(4, 1, 7), torch.randn(5, 7)).model.forward
    assert (found.flops, found.elementwise) == (0, 140 + 5 * 140)
    assert profiled(Calls(lambda x: x * 2 + 1), torch.arange(5)).model.forward.elementwise == 0
    norm = profiled(nn.LayerNorm(6), torch.randn(4, 6)).model.forward
    assert norm.elementwise == operators.layer_norm(24, 6).elementwise


def test_what_has_no_formula_is_listed_and_can_be_given_one() -> None:
    profiler = FlopsProfiler(Calls(torch.linalg.matrix_exp))
    profiler.start_profile()
    profiler.model(torch.randn(3, 3))
    profiler.model(torch.randn(3, 3))
    profiler.stop_profile()
    assert profiler.not_counted == {"aten::linalg_matrix_exp": 2}


@pytest.mark.parametrize("shared", [True, False])
def test_a_module_in_several_places_runs_as_often_and_has_its_parameters_once(shared: bool) -> None:
    class Holds(nn.Module):
        def __init__(self, linear: nn.Module) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x)

    linears = [nn.Linear(10, 10, bias=False)] * 3 if shared else [nn.Linear(10, 10, bias=False) for _ in range(3)]
    net = nn.Sequential(*(Holds(linear) for linear in linears))
    found = profiled(net, torch.randn(1, 10))
    assert found.model.forward.macs == 300
    assert [child.forward.macs for child in found.model.children] == [100, 100, 100], "each place its own calls"
    assert found.model.parameters.numel == (100 if shared else 300)
    assert found.module("0.linear").calls == (3 if shared else 1)


@pytest.mark.parametrize("meta", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_alexnet(meta: bool) -> None:
    """Krizhevsky's "One weird trick" (2014) in torchvision's form: 714 million multiply-accumulates an image."""
    net = nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(3, 2), nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.AdaptiveAvgPool2d(6), nn.Flatten(),
        nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(),
        nn.Linear(4096, 1000),
    )  # fmt: skip
    convolutions = (
        55 * 55 * 3 * 64 * 121 + 27 * 27 * 64 * 192 * 25 + 13 * 13 * 9 * (192 * 384 + 384 * 256 + 256 * 256)
    )  # fmt: skip
    linears = 9216 * 4096 + 4096 * 4096 + 4096 * 1000
    batch = 256 if meta else 1
    flops, macs, params = get_model_profile(
        net.to("meta") if meta else net, (batch, 3, 224, 224), print_profile=False, as_string=False
    )
    assert macs == batch * (convolutions + linears) == batch * 714_188_480
    assert (flops, params) == (2 * macs, 61_100_840)


@pytest.mark.slow
def test_flexible_attention_is_counted_as_it_is_written() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k = torch.randn(1, 4, 128, 16), torch.randn(1, 2, 64, 16)
    found = profiled(Calls(lambda q, k: flex_attention(q, k, k, enable_gqa=True)), q, k)
    assert found.model.forward.macs == 4 * 128 * 64 * 16 * 2
    assert [name for name in found.operators if name.startswith("higher_order")] == ["higher_order::flex_attention"]


@pytest.mark.slow
def test_a_compiled_module_is_counted_as_it_is_written() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(net, backend="eager")
    compiled(torch.ones(2, 4))
    found = profiled(nn.Sequential(compiled), torch.ones(2, 4), backward=True).model
    assert (found.forward.macs, found.backward.macs) == (32, 32)
