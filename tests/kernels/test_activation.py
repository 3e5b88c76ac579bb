"""Activations into memory that is there: kernels equal the reference bit for bit; the reference is as torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.activation import FORMS, activate_, activate_backward_, reference

from .cases import DTYPES, SIZES, same_bits
from .oracles import THREADS, assert_all_same, num_threads, tensor

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
TORCHS = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu,
}  # fmt: skip


def forward(pre: torch.Tensor, form: str, gated: bool) -> torch.Tensor:
    a = torch.full((*pre.shape[:-1], pre.shape[-1] // (1 + gated)), 7.0, dtype=pre.dtype)
    activate_(a, pre, form, gated=gated)
    return a


def backward(da: torch.Tensor, pre: torch.Tensor, form: str, gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    a, dp = torch.full_like(da, 7.0), torch.full_like(pre, 7.0)
    activate_backward_(a, dp, da, pre, form, gated=gated)
    return a, dp


@examples(times=3)
@given(
    rows=st.sampled_from([(), (0,), (1,), (3,), (2, 5), (65,)]), dim=SIZES, dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS), gated=st.booleans(), offset=st.integers(0, 3), seed=st.integers(0, 1000),
    special=st.booleans(),
)  # fmt: skip
def test_every_instruction_set_equals_the_reference(
    rows: tuple[int, ...], dim: int, dtype: torch.dtype, form: str, gated: bool, offset: int, seed: int, special: bool
) -> None:
    pre = tensor((*rows, dim * (1 + gated)), dtype, seed, offset=offset, special=special)
    da = tensor((*rows, dim), dtype, seed + 1, offset=offset, special=special)
    assert_all_same(lambda: [forward(pre, form, gated)], [reference.activate(pre, form, gated)])
    assert_all_same(lambda: backward(da, pre, form, gated), reference.activate_backward(da, pre, form, gated))


@pytest.mark.parametrize("gated", [False, True])
def test_large_shapes_and_threads_change_nothing(gated: bool) -> None:
    pre, da = tensor((517, 1021 * (1 + gated)), torch.bfloat16, 0, offset=1), tensor((517, 1021), torch.bfloat16, 1)
    expected = (reference.activate(pre, "silu", gated), *reference.activate_backward(da, pre, "silu", gated))
    for threads in THREADS:
        with num_threads(threads):
            got = (forward(pre, "silu", gated), *backward(da, pre, "silu", gated))
        assert all(map(same_bits, got, expected)), threads


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_torch(form: str, gated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        pre = (torch.randn(9, 14, generator=generator, dtype=torch.float64) * 4).to(dtype).requires_grad_()
        z, u = pre.chunk(2, -1) if gated else (pre, torch.ones_like(pre))
        exact = TORCHS[form](z) * u
        da = torch.randn(exact.shape, generator=generator, dtype=torch.float64).to(dtype)
        (gradient,) = torch.autograd.grad(exact, pre, da)
        a, dp = backward(da, pre.detach(), form, gated)
        assert same_bits(a, forward(pre.detach(), form, gated))
        torch.testing.assert_close(a, exact.detach(), rtol=tolerance, atol=tolerance * 16)
        torch.testing.assert_close(dp, gradient, rtol=tolerance, atol=tolerance * 16)


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors_with_the_numbers(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    a, pre = torch.ones(3, 4), torch.ones(3, 8)
    for args, gated, message in (
        ((a.int(), pre, "silu"), True, "a is .*Int|a is torch.int32"),
        ((a, pre, "silu"), False, "pre has shape .*3, 8.*must be .*3, 4"),
        ((a, pre, "swish"), True, "activation is 'swish'; it must be 'gelu', 'gelu_tanh', 'relu' or 'silu'"),
        ((torch.ones(4, 3).t(), pre, "silu"), True, "a of shape .*3, 4.*strides .*1, 3"),
        ((a, torch.ones(3, 8, device="meta"), "silu"), True, "pre is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            activate_(*args, gated=gated)
    with pytest.raises(ValueError, match=r"grad_a has shape .*2, 4"):
        activate_backward_(a, pre, a[:2], pre, "silu", gated=True)


def test_autograd_notices_that_tensors_were_changed() -> None:
    a, pre, grad_pre = torch.ones(3), torch.ones(3), torch.ones(3)
    w = torch.ones(3, requires_grad=True)
    for change, tensor_ in (
        (lambda: activate_(a, pre, "relu"), a),
        (lambda: activate_backward_(a, grad_pre, a.clone(), pre, "relu"), a),
        (lambda: activate_backward_(a, grad_pre, a.clone(), pre, "relu"), grad_pre),
    ):
        y = (w * tensor_).sum()
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_opcheck() -> None:
    a, pre = torch.rand(3, 4), torch.rand(3, 8)
    torch.library.opcheck(torch.ops.zoo.activate_.default, (a, pre, "silu", True))
    args = (a, torch.empty_like(pre), a + 1, pre, "relu", True)
    torch.library.opcheck(torch.ops.zoo.activate_backward_.default, args)
