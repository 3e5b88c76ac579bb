"""Layer normalisation: every instruction set equals the reference bit for bit; the reference equals torch in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.layer_norm import layer_norm, layer_norm_backward, ops, reference

from .cases import DTYPES, same_bits
from .oracles import THREADS, assert_all_same, num_threads, tensor

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
DIMS = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 255, 256, 257, 1000, 1024]), st.integers(1, 700))
ROWS = st.sampled_from([(), (0,), (1,), (3,), (2, 5), (63,), (64,), (65,), (130,)])


@examples(times=3)
@given(
    rows=ROWS, dim=DIMS, dtype=st.sampled_from(DTYPES), weight_dtype=st.sampled_from(DTYPES), residual=st.booleans(),
    offset=st.integers(0, 3), seed=st.integers(0, 1000), special=st.booleans(), eps=st.sampled_from([1e-5, 0.0, 1e-12]),
)  # fmt: skip
def test_every_instruction_set_equals_the_reference(
    rows: tuple[int, ...], dim: int, dtype: torch.dtype, weight_dtype: torch.dtype, residual: bool, offset: int,
    seed: int, special: bool, eps: float,
) -> None:  # fmt: skip
    def of(kind: int, *shape: int, to: torch.dtype = dtype) -> torch.Tensor:
        return tensor(shape, to, seed + kind, offset=offset, special=special)

    x, r, w, b = of(0, *rows, dim), of(1, *rows, dim), of(2, dim, to=weight_dtype), of(3, dim, to=weight_dtype)
    expected: tuple[torch.Tensor, ...] = (
        reference.add_layer_norm(x, r, w, b, eps) if residual else reference.layer_norm(x, w, b, eps)
    )
    if not residual:
        expected = (expected[0], x, *expected[1:])
    assert_all_same(lambda: layer_norm(x, w, b, eps=eps, residual=r if residual else None), expected)
    dy, ds = of(4, *rows, dim), of(5, *rows, dim) if residual else None
    grads = reference.layer_norm_backward(dy, ds, expected[1], w, *expected[2:])
    assert_all_same(lambda: layer_norm_backward(dy, ds, expected[1], w, *expected[2:]), grads)


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(1030, 1021), (3, 2**18 + 1), (1, 2**20 + 7)])
def test_large_shapes_and_threads_change_nothing(shape: tuple[int, int]) -> None:
    x, dy, w, b = tensor(shape, torch.float32, 0, offset=1), tensor(shape, torch.float32, 1), *torch.rand(2, shape[1])
    expected = reference.layer_norm(x, w, b, 1e-5)
    grads = reference.layer_norm_backward(dy, None, x, w, *expected[1:])
    for threads in THREADS:
        with num_threads(threads):
            found = layer_norm(x, w, b)
            got = layer_norm_backward(dy, None, x, w, found.mean, found.rstd)
        assert all(map(same_bits, (found.y, found.mean, found.rstd, *got), (*expected, *grads))), threads


@examples(times=3)
@given(rows=st.integers(1, 20), dim=st.integers(2, 300), seed=st.integers(0, 1000), shift=st.sampled_from([0.0, 3.0]))
def test_the_mean_and_the_result_are_as_near_to_the_exact_ones_as_derived(
    rows: int, dim: int, seed: int, shift: float
) -> None:
    """|μ - exact| <= (c + 2)·u·mean|s|: c = ⌈D/64⌉ + 6 additions of a lane sum, 1/D rounded, a product; u = 2^-24.

    Let δ be that bound. Then each |s - μ| errs by δ + u·|s - μ|, so with σ the exact deviation the variance errs
    relatively by (c + 6)·u + 2δ/σ + (δ/σ)², 1/√ halves that, and x̂ errs by half of that times |x̂|, plus δ/σ, plus
    3u·|x̂| for its own roundings; w·x̂ + b adds two more of the size of the terms.
    """
    x = tensor((rows, dim), torch.float32, seed) + shift
    w, b = tensor((dim,), torch.float32, seed + 1), tensor((dim,), torch.float32, seed + 2)
    found = layer_norm(x, w, b, eps=0.0)
    exact = x.double()
    mean, sigma = exact.mean(-1), exact.std(-1, correction=0)
    hat = ((exact - mean[:, None]) / sigma[:, None]).abs()
    u, count = 2.0**-24, -(-dim // 64) + 6
    delta = (count + 2) * u * exact.abs().mean(-1)
    assert bool(((found.mean - mean).abs() <= delta).all())
    ratio = (delta / sigma)[:, None]
    relative = ((count + 6) * u + 2 * ratio + ratio**2) / 2
    bound = w.abs() * (hat * (relative * (1 + relative) + 4 * u) + ratio * 1.01) + 2 * u * (w.abs() * hat + b.abs())
    wanted = torch.nn.functional.layer_norm(exact, (dim,), w.double(), b.double(), 0.0)
    assert bool(((found.y - wanted).abs() <= bound).all())


def parameters(dtype: torch.dtype = torch.float64, rows: int = 5, dim: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, dim), (rows, dim), (dim,), (dim,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def test_the_gradient_of_the_reference_is_right() -> None:
    x, r, w, b = parameters()
    assert torch.autograd.gradcheck(lambda x, w, b: layer_norm(x, w, b)[0], (x, w, b))
    assert torch.autograd.gradcheck(lambda x, r, w, b: layer_norm(x, w, b, residual=r)[:2], (x, r, w, b))


@pytest.mark.parametrize("residual", [False, True])
def test_autograd_reaches_the_kernels(residual: bool) -> None:
    """Gradients of fp32 agree with those of fp64 to 1e-5, and are those of the backward operator bit for bit."""
    grads = []
    for dtype in (torch.float32, torch.float64):
        x, r, w, b = parameters(dtype, 70, 33)
        out = layer_norm(x, w, b, residual=r if residual else None)
        assert not out.mean.requires_grad
        assert not out.rstd.requires_grad
        loss = (out.y * out.y).sum() + (out.sum**3).sum()
        grads.append(torch.autograd.grad(loss, (x, r, w, b) if residual else (x, w, b)))
    for fast, exact in zip(*grads, strict=True):
        torch.testing.assert_close(fast.double(), exact, rtol=1e-5, atol=1e-5)


def test_torch_layer_norm_agrees() -> None:
    _, _, w, b = parameters(rows=50, dim=129)
    x = torch.randn(50, 129, dtype=torch.float64, requires_grad=True)
    ours, theirs = layer_norm(x, w, b).y, torch.nn.functional.layer_norm(x, (129,), w, b, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(ours)
    for a, c in zip(torch.autograd.grad(ours, (x, w, b), dy), torch.autograd.grad(theirs, (x, w, b), dy), strict=True):
        torch.testing.assert_close(a, c, rtol=1e-11, atol=1e-11)


# What users do wrong -------------------------------------------------------------------------------------------------


def call(**change: Any) -> Callable[[], Any]:
    arguments = {"x": torch.ones(3, 4), "weight": torch.ones(4), "bias": torch.ones(4)} | change
    return lambda: layer_norm(**arguments)


WRONG = [
    ({"x": torch.ones(3, 4, dtype=torch.int64)}, "x is .*(Long|int64).*allowed are"),
    ({"x": torch.ones(4, 3).t()}, r"x of shape .*3, 4.* has strides .*1, 3.*contiguous"),
    ({"x": torch.tensor(1.0)}, "x has .*at least (1|one)"),
    ({"x": torch.ones(3, 0)}, r"x has shape .*3, 0.*at least 1"),
    ({"x": torch.ones(3, 4).to_sparse()}, "x is .*[sS]parse|x is on"),
    ({"weight": torch.ones(5)}, r"weight has shape .*5.*must be .*4"),
    ({"weight": torch.ones(4).bfloat16()}, r"bias is .*Float|bias is torch.float32"),
    ({"weight": torch.ones(4, device="meta")}, "weight is on meta"),
    ({"weight": torch.ones(4).double(), "bias": torch.ones(4).double()}, "weight is torch.float64; allowed are"),
    ({"bias": torch.ones(8)[::2]}, r"bias .*strides .*2"),
    ({"residual": torch.ones(4, 4)}, r"residual has shape .*4, 4.*must be .*3, 4"),
    ({"residual": torch.ones(3, 4).half()}, "residual is .*(Half|float16)"),
    ({"eps": -1.0}, "eps is -1"),
]


@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize(("change", "message"), WRONG)
def test_mistakes_are_value_errors_with_the_numbers(
    change: dict[str, Any], message: str, mode: str, use_mode: UseMode
) -> None:
    use_mode(mode)
    with pytest.raises(ValueError, match=message):
        call(**change)()


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_in_the_backward(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    x, w, s = torch.ones(3, 4), torch.ones(4), torch.ones(3)
    for args, message in (
        ((x[:2], None, x, w, s, s), "grad_y has shape .*2, 4"),
        ((x, x.half(), x, w, s, s), "grad_sum is"),
        ((x, None, x, w[:2], s, s), "weight has shape"),
        ((x, None, x, w, s[:1], s), "mean has shape"),
        ((x, None, x, w, s, s.double()), "rstd is"),
    ):
        with pytest.raises(ValueError, match=message):
            layer_norm_backward(*args)


# What torch asks of an operator --------------------------------------------------------------------------------------


def test_opcheck() -> None:
    x, r, w, b = parameters(torch.float32)
    torch.library.opcheck(torch.ops.zoo.layer_norm.default, (x, w, b, 1e-5))
    torch.library.opcheck(torch.ops.zoo.add_layer_norm.default, (x, r, w, b, 1e-5))
    d = x.detach()
    _, _, mean, rstd = ops.layer_norm(d, w.detach(), b.detach())
    torch.library.opcheck(torch.ops.zoo.layer_norm_backward.default, (d, d, d, w.detach(), mean, rstd))
