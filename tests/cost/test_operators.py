"""Work of operators from their sizes: hand-derived integers, and what holds for all sizes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.cost import Work, operators
from zoo.cost.operators import (
    attention,
    attention_backward,
    batch_norm,
    convolution,
    elementwise,
    embedding,
    fft,
    hidden_scores,
    layer_norm,
    matrix_product,
    mixture_of_experts,
    recurrent_cell,
    recurrent_layers,
    reduction,
    rms_norm,
    softmax,
)

SIZES = st.integers(0, 9)


def test_a_matrix_product_by_hand() -> None:
    found = matrix_product(3, 5, 7, batch=2, bias=True, itemsize=4)
    assert (found.macs, found.flops, found.elementwise) == (210, 420, 42)
    assert (found.read_bytes, found.written_bytes) == ((2 * (15 + 35) + 7) * 4, 42 * 4)
    assert found.moved_bytes == found.read_bytes + found.written_bytes


def test_attention_by_hand_dense_and_causal() -> None:
    # Two heads of 4 and 3 numbers, 3 queries and 5 keys: 15 scores a head, of which 3·5 - (1 + 2 + 3) = 9 are hidden.
    dense = attention(1, 2, 3, 5, 4, value_size=3, kv_heads=1)
    causal = attention(1, 2, 3, 5, 4, value_size=3, kv_heads=1, causal=True)
    assert (dense.macs, dense.masked_macs, dense.causal_flops) == (2 * 15 * 7, 0, 2 * 2 * 15 * 7)
    assert (causal.macs, causal.masked_macs) == (2 * 15 * 7, 2 * 9 * 7)
    assert (causal.flops, causal.causal_flops) == (420, 2 * 2 * 6 * 7)
    # The last query sees the last key: 3 + 4 + 5 scores are seen.
    assert attention(1, 2, 3, 5, 4, causal="end").causal_flops == 2 * 2 * 12 * 8
    assert dense.read_bytes == 2 * (2 * 3 * 4 + 1 * 5 * 7)
    assert dense.written_bytes == 2 * (2 * 3 * 3)


@given(SIZES, SIZES, st.sampled_from(["start", "end"]))
def test_hidden_scores_are_those_above_the_diagonal(q: int, k: int, align: Literal["start", "end"]) -> None:
    shift = k - q if align == "end" else 0
    assert hidden_scores(q, k, align=align) == sum(j > i + shift for i in range(q) for j in range(k))


@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES)
def test_gradients_of_attention_are_two_products_for_each(b: int, h: int, q: int, k: int, d: int, dv: int) -> None:
    sizes: Any = (b, h, q, k, d)
    forward = attention(*sizes, value_size=dv, causal=True)
    gradients, again = attention_backward(*sizes, value_size=dv, causal=True)
    assert (gradients.macs, gradients.masked_macs) == (2 * forward.macs, 2 * forward.masked_macs)
    assert again.macs == b * h * q * k * d
    assert again.masked_macs == b * h * hidden_scores(q, k) * d * (d + dv > 0)


def test_convolutions_by_hand() -> None:
    # 6 × 6 to 4 × 4 with 3 × 3: 16 positions, 2·8·9 weights.
    plain = convolution(5, 2, 8, (6, 6), (4, 4), (3, 3), bias=True)
    assert (plain.macs, plain.elementwise) == (5 * 16 * 144, 5 * 8 * 16)
    assert plain.read_bytes == 2 * (5 * 2 * 36 + 144 + 8)
    grouped = convolution(5, 4, 8, (6, 6), (4, 4), (3, 3), groups=4)
    assert grouped.macs == 5 * 16 * (4 * 8 // 4) * 9
    transposed = convolution(5, 8, 2, (4, 4), (6, 6), (3, 3), transposed=True)
    assert transposed.macs == plain.macs, "a transposed one undoes the other with as many products"
    assert convolution(1, 1, 1, (7,), (5,), (3,)).macs == 15
    assert convolution(1, 1, 1, (3, 3, 3), (2, 2, 2), (2, 2, 2)).macs == 64


def test_recurrent_cells_by_hand() -> None:
    lstm = recurrent_cell("lstm", 3, 5, 7)
    assert lstm.macs == 3 * 4 * 7 * (5 + 7)
    assert lstm.elementwise == 3 * (2 * 4 * 7 + 13 * 7)
    assert recurrent_cell("gru", 3, 5, 7).macs == 3 * 3 * 7 * 12
    assert recurrent_cell("rnn", 3, 5, 7, bias=False).elementwise == 3 * 2 * 7
    assert recurrent_cell("lstm", 3, 5, 7, projection=2).macs == 3 * (4 * 7 * (5 + 2) + 7 * 2)
    both = recurrent_layers("lstm", 3, 10, 5, 7, layers=2, bidirectional=True)
    assert both.macs == 10 * 3 * 2 * 4 * 7 * ((5 + 7) + (14 + 7))


def test_a_mixture_of_experts_computes_what_is_active() -> None:
    found = mixture_of_experts(10, 4, 6, num_experts=8, top_k=2)
    assert found.macs == 10 * 4 * 8 + 20 * 2 * 4 * 6
    gated = mixture_of_experts(10, 4, 6, num_experts=8, top_k=2, gated=True, shared_size=3)
    assert gated.macs == 10 * 4 * 8 + 20 * 3 * 4 * 6 + 10 * 3 * 4 * 3
    assert mixture_of_experts(1, 4, 6, num_experts=8, top_k=2).read_bytes == 2 * (4 * 8 + 2 * 2 * 4 * 6 + 4)


def test_what_is_no_product_has_no_flops() -> None:
    for found in (
        embedding(5, 4), elementwise(20, operations=3), reduction(20), softmax(20), layer_norm(20, 4), rms_norm(20, 4),
        batch_norm(20, 4), batch_norm(20, 4, training=False), fft(64, 8),
    ):  # fmt: skip
        assert (found.macs, found.flops) == (0, 0)
        assert found.read_bytes > 0
        assert found.written_bytes > 0
    assert embedding(5, 4).elementwise == 0
    assert embedding(5, 4, itemsize=4).read_bytes == 5 * 4 * 4 + 5 * 8
    assert (layer_norm(20, 4).elementwise, layer_norm(20, 4, affine=False).elementwise) == (140, 100)
    assert (rms_norm(20, 4).elementwise, rms_norm(20, 4, affine=False).elementwise) == (80, 60)
    assert batch_norm(20, 4, training=False, affine=False).elementwise == 40
    assert (softmax(20).elementwise, fft(64, 8).elementwise) == (100, 5 * 64 * 3)
    assert fft(64, 8, real=True).elementwise == 5 * 64 * 3 // 2


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), max_size=4), st.integers(0, 5))
def test_work_adds_up(sizes: list[tuple[int, int, int]], times: int) -> None:
    works = [matrix_product(*one) for one in sizes]
    total = sum(works, Work())
    assert total.flops == 2 * sum(m * k * n for m, k, n in sizes)
    assert times * total == sum([total] * times, Work())


@given(SIZES, SIZES, SIZES, st.integers(1, 4))
def test_a_batch_is_so_many_products(m: int, k: int, n: int, batch: int) -> None:
    assert matrix_product(m, k, n, batch=batch) == batch * matrix_product(m, k, n)
    # Rows side by side read the right matrix once.
    wide, each = matrix_product(batch * m, k, n), batch * matrix_product(m, k, n)
    assert wide.macs == each.macs
    assert wide.read_bytes == each.read_bytes - (batch - 1) * k * n * 2


@given(SIZES, SIZES, st.integers(1, 4), st.integers(1, 4))
def test_every_expert_for_every_token_is_a_dense_perceptron(tokens: int, d: int, hidden: int, experts: int) -> None:
    found = mixture_of_experts(tokens, d, hidden, experts, experts)
    dense = matrix_product(tokens, d, hidden) + matrix_product(tokens, hidden, d)
    assert found.macs == experts * dense.macs + tokens * d * experts


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: matrix_product(-1, 2, 3), "m=-1; a size is at least 0"),
        (lambda: convolution(1, 4, 4, (3,), (3,), (3, 3)), "give as many of each"),
        (lambda: convolution(1, 4, 6, (3,), (3,), (3,), groups=4), "groups=4 of 4 input and 6 output channels"),
        (lambda: recurrent_cell("tree", 1, 1, 1), "allowed are 'rnn', 'gru', 'lstm'"),  # type: ignore[arg-type]
        (lambda: recurrent_cell("gru", 1, 1, 1, projection=2), "only an LSTM"),
        (lambda: mixture_of_experts(1, 1, 1, 4, 5), "top_k=5 of 4 experts"),
    ],
)
def test_what_cannot_be_is_said(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_a_model_that_everybody_knows() -> None:
    """6·N·T of a transformer (Kaplan et al. 2020, section 2.1): its matrices, three times forward, without scores."""
    layers, wide, tokens = 12, 768, 1024
    of_layer = matrix_product(tokens, wide, 3 * wide) + matrix_product(tokens, wide, wide)
    of_layer += matrix_product(tokens, wide, 4 * wide) + matrix_product(tokens, 4 * wide, wide)
    forward = layers * of_layer
    assert 3 * forward.flops == 6 * (12 * layers * wide**2) * tokens
    scores = layers * attention(1, 12, tokens, tokens, 64, causal=True)
    assert Fraction(scores.flops, forward.flops) == Fraction(2 * 2 * wide * tokens * tokens, forward.flops // layers)
    assert operators.COMPLEX == 4
