"""Dropout with bias and residual: one mask everywhere, that of Philox; kernels equal the reference bit for bit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading, philox
from zoo.kernels.bias_dropout_residual import (
    bias_dropout_residual,
    bias_dropout_residual_backward,
    dropout,
    reference,
)  # fmt: skip
from zoo.kernels.building.plan import SOURCES, find_compiler

from .cases import DTYPES, SIZES, same_bits
from .oracles import THREADS, assert_all_same, num_threads, tensor

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
WORDS = st.integers(0, 2**64 - 1)


# Counter (four words), key (two), answer: what is published for philox4x32-10 with the paper's library.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]  # fmt: skip
P = st.sampled_from([0.0, 0.1, 0.5, 0.999999, 2.0**-40, 1 - 2.0**-33, 1.0])
PROGRAM = """
#include <cstdio>
#include "common/philox.h"
int main() {
  unsigned long long seed, offset, index;
  while (scanf("%llx %llx %llx", &seed, &offset, &index) == 3) {
    uint32_t word[4];
    zoo::philox({seed, offset}, index, word);
    printf("%08x %08x %08x %08x\\n", word[0], word[1], word[2], word[3]);
  }
}
"""


def joined(low: int, high: int) -> int:
    return low | high << 32


def test_philox_of_the_reference_gives_the_known_answers() -> None:
    for counter, key, expected in KNOWN:
        index, offset, seed = joined(*counter[:2]), joined(*counter[2:]), joined(*key)
        signed = index - 2**64 if index >= 2**63 else index
        assert philox.blocks(seed, offset, torch.tensor([signed])).flatten().tolist() == expected


def test_philox_of_the_kernels_gives_the_known_answers(tmp_path: Path) -> None:
    source, program = tmp_path / "known.cpp", tmp_path / "known"
    source.write_text(PROGRAM)
    subprocess.run([*find_compiler(), "-std=c++17", f"-I{SOURCES}", str(source), "-o", str(program)], check=True)
    lines = [f"{joined(*key):x} {joined(*counter[2:]):x} {joined(*counter[:2]):x}" for counter, key, _ in KNOWN]
    answers = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    assert [[int(word, 16) for word in line.split()] for line in answers.splitlines()] == [k[2] for k in KNOWN]


def test_the_words_of_a_tensor_are_those_of_its_counters() -> None:
    seed, offset = joined(*KNOWN[2][1]), joined(*KNOWN[2][0][2:])
    each = [philox.blocks(seed, offset, torch.tensor(i)) for i in range(5)]
    assert philox.words(seed, offset, 18).tolist() == torch.cat(each).tolist()[:18]


@examples(times=3)
@given(
    rows=st.sampled_from([(), (0,), (1,), (3,), (2, 5), (65,), (130,)]), dim=SIZES, dtype=st.sampled_from(DTYPES),
    bias_dtype=st.sampled_from(DTYPES), p=P, seed=WORDS,
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


@examples(times=3)
@given(
    rows=st.sampled_from([(), (0,), (1,), (3,), (2, 5), (65,)]), dim=SIZES, dtype=st.sampled_from(DTYPES), p=P,
    seed=WORDS, generator_offset=WORDS, first=st.one_of(st.integers(0, 9), st.integers(0, 2**63 - 2**20)),
    offset=st.integers(0, 3), special=st.booleans(),
)  # fmt: skip
def test_dropout_alone_equals_the_reference_on_every_instruction_set(
    rows: tuple[int, ...], dim: int, dtype: torch.dtype, p: float, seed: int, generator_offset: int, first: int,
    offset: int, special: bool,
) -> None:  # fmt: skip
    x = tensor((*rows, dim), dtype, 0, offset=offset, special=special)
    expected = reference.dropout(x, p, seed, generator_offset, first)
    assert_all_same(lambda: [dropout(x, p=p, seed=seed, offset=generator_offset, first=first)], [expected])


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_a_part_gets_its_part_of_the_mask_and_the_gradient_gets_the_mask(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    x = torch.arange(1.0, 7 * 13 * 5 + 1).view(7, 13, 5)
    whole = dropout(x, p=0.4, seed=11, offset=3)
    assert same_bits(whole, bias_dropout_residual_backward(x, torch.zeros(5), p=0.4, seed=11, offset=3)[0])
    assert 0 < int((whole == 0).sum()) < x.numel()
    parts = [dropout(part, p=0.4, seed=11, offset=3, first=k * part.numel()) for k, part in enumerate(x)]
    assert same_bits(torch.stack(parts), whole)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(dropout(leaf, p=0.4, seed=11, offset=3, first=6), leaf, torch.ones_like(x))
    assert same_bits(dx, dropout(torch.ones_like(x), p=0.4, seed=11, offset=3, first=6))


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
    """Of n = 2^20 independent elements the share that is dropped is within 5·√(p(1 - p)/n) of p.

    Five deviations of a binomial: a generator of independent words leaves them for one seed in 1.7 million. Two masks
    drop a common element with probability p², which is what they do if seeds and offsets give independent words.
    """
    x, none = torch.ones(1024, 1024), torch.zeros(1024)
    zeros = torch.zeros_like(x)
    masks = []
    for p in (0.01, 0.5, 0.9):
        out = bias_dropout_residual(x, none, zeros, p=p, seed=3)
        assert abs(float((out == 0).double().mean()) - p) <= 5 * (p * (1 - p) / 2**20) ** 0.5
    for p, seed, offset in ((0.1, 1, 0), (0.1, 2, 0), (0.1, 1, 1)):
        out = bias_dropout_residual(x, none, zeros, p=p, seed=seed, offset=offset)
        masks.append(out == 0)
        assert abs(float(masks[-1].double().mean()) - p) <= 5 * (p * (1 - p) / 2**20) ** 0.5
        torch.testing.assert_close(out[~masks[-1]], torch.full_like(out[~masks[-1]], 1 / (1 - p)))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        both = float((masks[a] & masks[b]).double().mean())
        assert abs(both - 0.01) <= 5 * (0.01 * 0.99 / 2**20) ** 0.5


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_edges_of_p_and_evaluation(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    for dtype in DTYPES:
        x, r = tensor((5, 67), dtype, 0, special=True), tensor((5, 67), dtype, 1)
        b = tensor((67,), torch.float32, 2)
        plain = (r.float() + (x.float() + b)).to(dtype)
        for p, training in ((0.0, True), (0.7, False), (1.0, False)):
            assert same_bits(bias_dropout_residual(x, b, r, p=p, seed=1, training=training), plain)
        assert same_bits(bias_dropout_residual(x, b, r, p=1.0, seed=1), r + 0.0)  # -0 + 0 is +0
        dx, db = bias_dropout_residual_backward(x, b, p=1.0, seed=1)
        assert same_bits(dx, torch.zeros_like(x))
        assert same_bits(db, torch.zeros_like(b))
        assert same_bits(bias_dropout_residual_backward(x, b, p=0.0, seed=1)[0], x)


def test_the_backward_drops_what_the_forward_dropped() -> None:
    x = torch.ones(65, 33, requires_grad=True)
    out = bias_dropout_residual(x, torch.zeros(33), torch.zeros(65, 33), p=0.6, seed=2**63 + 5, offset=2**64 - 1)
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert same_bits(dx, out.detach())
    evaluated = bias_dropout_residual(x, torch.zeros(33), torch.zeros(65, 33), p=0.6, seed=5, training=False)
    assert same_bits(torch.autograd.grad(evaluated.sum(), x)[0], torch.ones(65, 33))


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
def test_mistakes_are_value_errors_with_the_numbers(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    x, b = torch.ones(3, 4), torch.ones(4)
    for args, more, message in (
        ((x.int(), b, x), {}, "x is .*Int|x is torch.int32"),
        ((torch.ones(4, 3).t(), b, x), {}, "x of shape .*3, 4.*strides .*1, 3"),
        ((x, torch.ones(5), x), {}, "bias has shape .*5.*must be .*4"),
        ((x, b, x[:2]), {}, "residual has shape .*2, 4.*must be .*3, 4"),
        ((x, b, x.half()), {}, "residual is"),
        ((x, b, torch.ones(3, 4, device="meta")), {}, "residual is on meta"),
        ((x, b.double(), x), {}, "bias is torch.float64; allowed are torch.float32"),
        ((x, b, x), {"p": 1.5}, "p is 1.5; it must be between 0 and 1"),
        ((x, b, x), {"p": -0.1}, "p is -0.1"),
        ((x, b, x), {"p": float("nan")}, "p is nan"),
        ((x, b, x), {"seed": 2**64}, "seed is 18446744073709551616; it must fit into 64 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            bias_dropout_residual(*args, **{"p": 0.5, "seed": 1} | more)
    for first in (-1, 2**63):
        with pytest.raises(ValueError, match=f"first is {first}; it must not be negative"):
            dropout(x, p=0.5, seed=1, first=first)
    with pytest.raises(ValueError, match=r"x is .*Int|x is torch.int32"):
        dropout(x.int(), p=0.5, seed=1)
    with pytest.raises(ValueError, match=r"grad_out is"):
        bias_dropout_residual_backward(x.int(), b, p=0.5, seed=1)


def test_opcheck() -> None:
    x, b, r = (torch.rand(*s, requires_grad=True) for s in ((3, 4), (4,), (3, 4)))
    torch.library.opcheck(torch.ops.zoo.bias_dropout_residual.default, (x, b, r, 0.5, 1, 2))
    torch.library.opcheck(torch.ops.zoo.bias_dropout_residual_backward.default, (x.detach(), b.detach(), 0.5, 1, 2))
    torch.library.opcheck(torch.ops.zoo.dropout.default, (x, 0.5, 1, 2, 3))
