"""Dropout with bias and residual: one mask everywhere, that of Philox; kernels equal the reference bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zoo.kernels import loading, philox
from zoo.kernels.bias_dropout_residual import bias_dropout_residual, bias_dropout_residual_backward, reference

from .cases import DTYPES, SIZES, same_bits
from .oracles import THREADS, assert_all_same, num_threads, tensor

quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
WORDS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("index", "offset", "seed", "expected"),
    [
        (0, 0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (2, 0x03707344_13198A2E, 0x299F31D0_A4093822, None),
    ],
)
def test_philox_is_that_of_the_paper(index: int, offset: int, seed: int, expected: list[int] | None) -> None:
    """The first answer is published with the paper's library; the second is computed here from its definition."""
    counter = [index & 0xFFFFFFFF, index >> 32, offset & 0xFFFFFFFF, offset >> 32]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    assert expected in (None, counter)
    assert philox.words(seed, offset, 4 * index + 4)[-4:].tolist() == counter


@quick
@given(
    rows=st.sampled_from([(), (0,), (1,), (3,), (2, 5), (65,), (130,)]), dim=SIZES, dtype=st.sampled_from(DTYPES),
    bias_dtype=st.sampled_from(DTYPES), p=st.sampled_from([0.0, 0.1, 0.5, 0.999999, 2.0**-40]), seed=WORDS,
    generator_offset=WORDS, offset=st.integers(0, 3), special=st.booleans(),
)  # fmt: skip
def test_every_instruction_set_equals_the_reference(
    rows: tuple[int, ...], dim: int, dtype: torch.dtype, bias_dtype: torch.dtype, p: float, seed: int,
    generator_offset: int, offset: int, special: bool,
) -> None:  # fmt: skip
    x, r = (tensor((*rows, dim), dtype, k, offset=offset, special=special) for k in (0, 1))
    b = tensor((dim,), bias_dtype, 2, offset=offset, special=special)
    generator = (p, seed, generator_offset)
    keys = {"p": p, "seed": seed, "offset": generator_offset}
    expected = reference.bias_dropout_residual(x, b, r, *generator)
    assert_all_same(lambda: [bias_dropout_residual(x, b, r, **keys)], [expected])
    grads = reference.bias_dropout_residual_backward(r, b, *generator)
    assert_all_same(lambda: bias_dropout_residual_backward(r, b, **keys), grads)


def test_large_shapes_and_threads_change_nothing() -> None:
    x, r, b = tensor((1031, 1021), torch.float32, 0, offset=1), tensor((1031, 1021), torch.float32, 1), torch.rand(1021)
    expected = reference.bias_dropout_residual(x, b, r, 0.3, 7, 9)
    grads = reference.bias_dropout_residual_backward(x, b, 0.3, 7, 9)
    for threads in THREADS:
        with num_threads(threads):
            got = bias_dropout_residual(x, b, r, p=0.3, seed=7, offset=9)
            back = bias_dropout_residual_backward(x, b, p=0.3, seed=7, offset=9)
        assert all(map(same_bits, (got, *back), (expected, *grads))), threads


def test_the_mask_drops_as_many_as_asked_and_seeds_and_offsets_matter() -> None:
    """Of n = 2^20 independent elements the share that is dropped is within 5·√(p(1 - p)/n) of p."""
    x, none = torch.ones(1024, 1024), torch.zeros(1024)
    zeros = torch.zeros_like(x)
    masks = []
    for p, seed, offset in ((0.1, 1, 0), (0.1, 2, 0), (0.1, 1, 1)):
        out = bias_dropout_residual(x, none, zeros, p=p, seed=seed, offset=offset)
        masks.append(out == 0)
        assert abs(float(masks[-1].double().mean()) - p) <= 5 * (p * (1 - p) / 2**20) ** 0.5
        torch.testing.assert_close(out[~masks[-1]], torch.full_like(out[~masks[-1]], 1 / (1 - p)))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        both = float((masks[a] & masks[b]).double().mean())
        assert abs(both - 0.01) <= 5 * (0.01 * 0.99 / 2**20) ** 0.5


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((5, 7), (7,), (5, 7))
    x, b, r = (torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)

    def run(x: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return bias_dropout_residual(x, b, r, p=0.4, seed=3, offset=5)

    assert torch.autograd.gradcheck(run, (x, b, r))
    exact = torch.autograd.grad((run(x, b, r) ** 2).sum(), (x, b, r))
    low = [t.detach().float().requires_grad_() for t in (x, b, r)]
    for a, c in zip(torch.autograd.grad((run(*low) ** 2).sum(), low), exact, strict=True):
        torch.testing.assert_close(a.double(), c, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors_with_the_numbers(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_KERNELS", mode)
    x, b = torch.ones(3, 4), torch.ones(4)
    for args, more, message in (
        ((x.int(), b, x), {}, "x is .*Int|x is torch.int32"),
        ((torch.ones(4, 3).t(), b, x), {}, "x of shape .*3, 4.*strides .*1, 3"),
        ((x, torch.ones(5), x), {}, "bias has shape .*5.*must be .*4"),
        ((x, b, x[:2]), {}, "residual has shape .*2, 4.*must be .*3, 4"),
        ((x, b, x.half()), {}, "residual is"),
        ((x, b, torch.ones(3, 4, device="meta")), {}, "residual is on meta"),
        ((x, b, x), {"p": 1.0}, "p is 1.*less than 1"),
        ((x, b, x), {"p": -0.1}, "p is -0.1"),
        ((x, b, x), {"p": float("nan")}, "p is nan"),
        ((x, b, x), {"seed": 2**64}, "seed is 18446744073709551616; it must fit into 64 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            bias_dropout_residual(*args, **{"p": 0.5, "seed": 1} | more)
    with pytest.raises(ValueError, match=r"grad_out is"):
        bias_dropout_residual_backward(x.int(), b, p=0.5, seed=1)


def test_opcheck() -> None:
    x, b, r = (torch.rand(*s, requires_grad=True) for s in ((3, 4), (4,), (3, 4)))
    torch.library.opcheck(torch.ops.zoo.bias_dropout_residual.default, (x, b, r, 0.5, 1, 2))
    torch.library.opcheck(torch.ops.zoo.bias_dropout_residual_backward.default, (x.detach(), b.detach(), 0.5, 1, 2))
