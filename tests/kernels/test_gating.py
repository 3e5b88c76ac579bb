"""Gating: every instruction set equals the reference bit for bit, which equals plain loops and torch in fp64."""

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
from zoo.kernels.gating import (
    Positions,
    expert_rows,
    permute,
    positions_in_expert,
    reference,
    top_k_gate,
    top_k_gate_backward,
    unpermute,
    unpermute_backward,
)

from .cases import DTYPES, random_indices, same_bits
from .oracles import THREADS, assert_all_same, num_threads, tensor

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
TOKENS = st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65, 257]), st.integers(0, 100))
EXPERTS = st.one_of(st.sampled_from([1, 2, 8, 16, 63, 64, 65, 160]), st.integers(1, 130))
DIMS = st.one_of(st.sampled_from([0, 1, 2, 7, 63, 64, 65, 129, 1024]), st.integers(0, 300))
CAPACITIES = st.one_of(st.none(), st.integers(0, 40))
PRIORITIES = st.sampled_from(["choice", "token"])
MODES = pytest.mark.parametrize("mode", ["native", "reference"])


def random_rows(tokens: int, choices: int, num_rows: int, seed: int) -> torch.Tensor:
    """Different rows, in no order; -1 for about a fifth and for those that there is no room for."""
    generator = torch.Generator().manual_seed(seed)
    n = tokens * choices
    rows = torch.randperm(max(n, num_rows), generator=generator)[:n]
    dropped = (torch.rand(n, generator=generator) < 0.2) | (rows >= num_rows)
    return rows.masked_fill(dropped, -1).view(tokens, choices)


# The choice -----------------------------------------------------------------------------------------------------------


@examples(times=3)
@given(
    tokens=TOKENS, experts=EXPERTS, k=st.integers(1, 8), dtype=st.sampled_from(DTYPES), renormalise=st.booleans(),
    offset=st.integers(0, 3), seed=st.integers(0, 1000), special=st.booleans(), coarse=st.booleans(),
)  # fmt: skip
def test_every_instruction_set_gives_the_choice_of_the_reference(
    tokens: int, experts: int, k: int, dtype: torch.dtype, renormalise: bool, offset: int, seed: int, special: bool,
    coarse: bool,
) -> None:  # fmt: skip
    k = min(k, experts)
    logits = tensor((tokens, experts), dtype, seed, offset=offset, special=special)
    if coarse:  # many ties
        logits = logits.copy_(logits.float().round().to(dtype))
    expected = reference.top_k_gate(logits, k, renormalise)
    assert_all_same(lambda: top_k_gate(logits, k, renormalise=renormalise), expected)
    dw = tensor((tokens, k), torch.float32, seed + 1, offset=offset, special=special)
    grad = reference.top_k_gate_backward(dw, logits, expected[1], renormalise)
    assert_all_same(lambda: [top_k_gate_backward(dw, logits, expected[1], renormalise=renormalise)], [grad])


@examples(times=3)
@given(
    tokens=st.integers(1, 20), experts=EXPERTS, k=st.integers(1, 8), seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES), renormalise=st.booleans(),
)  # fmt: skip
def test_the_choice_is_top_k_of_the_softmax_as_accurately_as_derived(
    tokens: int, experts: int, k: int, seed: int, dtype: torch.dtype, renormalise: bool
) -> None:
    """Relatively (2·max|v - M| + 2·c + 12)·u + 2^-126 absolutely, u = 2^-24: c = ⌈E/64⌉ + 6 additions, or k.

    v - M errs by u·|v - M|, which exp makes a relative error, also in S; exp adds 4u, in S too; S c·u; the inverse and
    the product 2u.
    """
    k = min(k, experts)
    logits = tensor((tokens, experts), dtype, seed)
    found = top_k_gate(logits, k, renormalise=renormalise)
    exact = logits.double()
    best = torch.topk(exact, k, -1).values
    assert bool((exact.gather(-1, found.indices) == best).all())
    assert all(len(set(row)) == k for row in found.indices.tolist())
    softmax = exact.softmax(-1).gather(-1, found.indices)
    if renormalise:
        softmax = best.softmax(-1)
    spread = (exact - exact.amax(-1, keepdim=True)).abs().amax(-1, keepdim=True)
    count = k if renormalise else -(-experts // 64) + 6
    bound = softmax * (2 * spread + 2 * count + 12) * 2.0**-24 + 2.0**-126
    assert bool(((found.probabilities.double() - softmax).abs() <= bound).all())
    if renormalise:
        assert float((found.probabilities.double().sum(-1) - 1).abs().max()) <= (2 * k + 4) * 2.0**-24


@MODES
def test_ties_nans_and_infinities(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([
        [1.0, 2.0, 2.0, 1.0], [0.0, -0.0, 0.0, -0.0], [0.0, nan, 5.0, nan], [0.0, 1.0, inf, inf],
        [-inf, -inf, 3.0, -inf], [-inf, -inf, -inf, -inf],
    ])  # fmt: skip
    for renormalise in (False, True):
        gate = top_k_gate(logits, 3, renormalise=renormalise)
        expected = [[1, 2, 0], [0, 1, 2], [1, 3, 2], [2, 3, 1], [2, 0, 1], [0, 1, 2]]
        assert gate.indices.tolist() == expected
        assert gate.probabilities.isnan().all(-1).tolist() == [False, False, True, True, False, False]
        assert gate.probabilities.isnan().any(-1).tolist() == [False, False, True, True, False, False]
        assert gate.probabilities[4:].tolist() == [[1, 0, 0], [0, 0, 0]]
        assert gate.probabilities[1].tolist() == ([torch.tensor(1 / 3).item()] * 3 if renormalise else [0.25] * 3)
    one = top_k_gate(logits[:2], 1, renormalise=True)
    assert one.probabilities.tolist() == [[1], [1]]


def test_gradients_of_the_choice() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    dw = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    for renormalise in (False, True):
        assert torch.autograd.gradcheck(lambda v, r=renormalise: top_k_gate(v, 3, renormalise=r).probabilities, logits)
        p, indices = torch.topk(torch.softmax(logits, -1), 3)
        theirs = torch.autograd.grad(((p / p.sum(-1, keepdim=True) if renormalise else p) * dw).sum(), logits)[0]
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
            v = logits.detach().to(dtype).requires_grad_()
            gate = top_k_gate(v, 3, renormalise=renormalise)
            assert torch.equal(gate.indices, indices)
            assert not gate.indices.requires_grad
            (ours,) = torch.autograd.grad((gate.probabilities * dw.to(dtype)).sum(), v)
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


# Places ---------------------------------------------------------------------------------------------------------------


def by_hand(
    indices: torch.Tensor, experts: int, capacity: int | None, priority: str
) -> tuple[list[list[int]], list[int], list[int]]:
    tokens, choices = indices.shape
    order = [(t, j) for t in range(tokens) for j in range(choices)]
    if priority == "choice":
        order.sort(key=lambda each: each[1])
    taken, positions = [0] * experts, [[0] * choices for _ in range(tokens)]
    for t, j in order:
        e = int(indices[t, j])
        positions[t][j] = taken[e] if capacity is None or taken[e] < capacity else -1
        taken[e] += 1
    return positions, [n if capacity is None else min(n, capacity) for n in taken], taken


@examples(times=3)
@given(
    tokens=TOKENS, experts=EXPERTS, k=st.integers(1, 4), capacity=CAPACITIES, priority=PRIORITIES,
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_places_are_those_of_a_loop(
    tokens: int, experts: int, k: int, capacity: int | None, priority: Any, seed: int
) -> None:
    k = min(k, experts)
    indices = random_indices(tokens, k, experts, seed)
    found = positions_in_expert(indices, experts, capacity=capacity, priority=priority)
    positions, counts, demand = by_hand(indices, experts, capacity, priority)
    assert found.positions.tolist() == positions
    assert (found.counts.tolist(), found.demand.tolist()) == (counts, demand)
    assert int(found.counts.sum()) == tokens * k - int((found.positions < 0).sum())
    plain = reference.positions_in_expert(indices, experts, capacity, priority == "choice")
    assert all(map(same_bits, found[:3], plain))


@pytest.mark.parametrize("priority", ["choice", "token"])
def test_threads_change_no_place(priority: Any) -> None:
    indices = random_indices(100_003, 3, 37, 0)
    expected = reference.positions_in_expert(indices, 37, 5000, priority == "choice")
    for threads in THREADS:
        with num_threads(threads):
            found = positions_in_expert(indices, 37, capacity=5000, priority=priority)
        assert all(map(same_bits, found[:3], expected)), threads


def test_first_choices_come_before_second_ones() -> None:
    indices = torch.tensor([[0, 1], [1, 0], [1, 0]])
    assert positions_in_expert(indices, 2, capacity=2).positions.tolist() == [[0, -1], [0, 1], [1, -1]]
    by_token = positions_in_expert(indices, 2, capacity=2, priority="token")
    assert by_token.positions.tolist() == [[0, 0], [1, 1], [-1, -1]]
    assert (by_token.counts.tolist(), by_token.demand.tolist()) == ([2, 2], [3, 3])


def test_an_index_that_has_no_place_has_no_row() -> None:
    """As on CUDA, where an index of no expert is not refused."""
    at = Positions(torch.tensor([[0, -1], [-1, 1]]), torch.tensor([1, 2]), torch.tensor([1, 2]), 3)
    indices = torch.tensor([[0, 2], [-5, 1]])
    assert expert_rows(indices, at).tolist() == [[0, -1], [-1, 2]]
    assert expert_rows(indices, at, padded=True).tolist() == [[0, -1], [-1, 4]]


@examples(times=3)
@given(
    tokens=TOKENS, experts=EXPERTS, k=st.integers(1, 4), capacity=CAPACITIES, priority=PRIORITIES, padded=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_the_rows_of_an_expert_are_its_tokens_in_the_order_of_priority(
    tokens: int, experts: int, k: int, capacity: int | None, priority: Any, padded: bool, seed: int
) -> None:
    k, padded = min(k, experts), padded and capacity is not None
    indices = random_indices(tokens, k, experts, seed)
    at = positions_in_expert(indices, experts, capacity=capacity, priority=priority)
    rows = expert_rows(indices, at, padded=padded)
    x = torch.arange(tokens, dtype=torch.float32)[:, None] + 1
    num_rows = experts * (capacity or 0) if padded else tokens * k
    groups = permute(x, rows, num_rows=num_rows)[:, 0].tolist()
    served = indices.t().reshape(-1).tolist() if priority == "choice" else indices.reshape(-1).tolist()
    first = 0
    for e, count in enumerate(at.counts.tolist()):
        first = e * (capacity or 0) if padded else first
        tokens_of_e = [s % tokens if priority == "choice" else s // k for s, to in enumerate(served) if to == e]
        assert groups[first : first + count] == [t + 1.0 for t in tokens_of_e[:count]]
        if padded:
            assert groups[first + count : first + (capacity or 0)] == [0.0] * ((capacity or 0) - count)
        first += count
    if not padded:
        assert groups[first:] == [0.0] * (num_rows - first)


# There and back -------------------------------------------------------------------------------------------------------


@examples(times=3)
@given(
    tokens=TOKENS, k=st.integers(1, 4), dim=DIMS, spare=st.integers(-20, 20), dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES), offset=st.integers(0, 3), seed=st.integers(0, 1000), special=st.booleans(),
)  # fmt: skip
def test_every_instruction_set_moves_as_the_reference(
    tokens: int, k: int, dim: int, spare: int, dtype: torch.dtype, weight_dtype: torch.dtype, offset: int, seed: int,
    special: bool,
) -> None:  # fmt: skip
    num_rows = max(tokens * k + spare, 0)
    rows = random_rows(tokens, k, num_rows, seed)
    x = tensor((tokens, dim), dtype, seed, offset=offset, special=special)
    y = tensor((num_rows, dim), dtype, seed + 1, offset=offset, special=special)
    w = tensor((tokens, k), weight_dtype, seed + 2, offset=offset, special=special)
    assert_all_same(lambda: [permute(x, rows, num_rows=num_rows)], [reference.permute(x, rows, num_rows)])
    assert_all_same(lambda: [unpermute(y, rows)], [reference.unpermute(y, rows, None)])
    assert_all_same(lambda: [unpermute(y, rows, w)], [reference.unpermute(y, rows, w)])
    assert_all_same(lambda: unpermute_backward(x, y, rows, w), reference.unpermute_backward(x, y, rows, w))


def test_large_shapes_and_threads_change_nothing() -> None:
    tokens, k, experts, dim = 1031, 3, 509, 257
    logits, x = tensor((tokens, experts), torch.float32, 0, offset=1), tensor((tokens, dim), torch.float32, 1)
    gate = reference.top_k_gate(logits, k, False)
    dw = tensor((tokens, k), torch.float32, 2)
    dv = reference.top_k_gate_backward(dw, logits, gate[1], False)
    rows = random_rows(tokens, k, 3000, 0)
    y = reference.permute(x, rows, 3000)
    out = reference.unpermute(y, rows, gate[0])
    grads = reference.unpermute_backward(x, y, rows, gate[0])
    for threads in THREADS:
        with num_threads(threads):
            assert all(map(same_bits, top_k_gate(logits, k), gate)), threads
            assert same_bits(top_k_gate_backward(dw, logits, gate[1]), dv), threads
            assert same_bits(permute(x, rows, num_rows=3000), y), threads
            assert same_bits(unpermute(y, rows, gate[0]), out), threads
            assert all(map(same_bits, unpermute_backward(x, y, rows, gate[0]), grads)), threads


@pytest.mark.parametrize("dim", [4096, 4099])
def test_many_bytes_are_permuted_as_few(dim: int) -> None:
    """From 16 MB on rows are written past the caches, whatever address they begin at; what is dropped leaves zeros."""
    tokens, num_rows = 1000, 2100
    assert 2 * num_rows * dim > 2**24
    x = torch.arange(tokens * dim).to(torch.int16).view(torch.bfloat16).view(tokens, dim)
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))[: 2 * tokens].view(tokens, 2)
    rows[::7, 1] = -1
    expected = torch.zeros(num_rows, dim, dtype=x.dtype)
    for choice in rows.t():
        expected[choice[choice >= 0]] = x[choice >= 0]
    for threads in (1, 3):
        with num_threads(threads):
            assert_all_same(
                lambda: [permute(x, rows, num_rows=num_rows).view(torch.int16)], [expected.view(torch.int16)]
            )


@examples(times=3)
@given(
    tokens=st.integers(1, 60), experts=st.integers(1, 20), k=st.integers(1, 4), dim=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES), priority=PRIORITIES, seed=st.integers(0, 1000),
)  # fmt: skip
def test_there_and_back_is_the_identity_when_nothing_is_dropped(
    tokens: int, experts: int, k: int, dim: int, dtype: torch.dtype, priority: Any, seed: int
) -> None:
    """Weights that sum to 1 + (2k + 4)·u at most give x to (3k + 4)·u relatively, u = 2^-24, then one more rounding.

    k products and k additions of terms of one sign add k·u to what the weights themselves are off.
    """
    k = min(k, experts)
    x = tensor((tokens, dim), dtype, seed)
    gate = top_k_gate(tensor((tokens, experts), torch.float32, seed + 1), k, renormalise=True)
    rows = expert_rows(gate.indices, positions_in_expert(gate.indices, experts, priority=priority))
    back = unpermute(permute(x, rows), rows, gate.probabilities)
    info = torch.finfo(dtype)
    off = (3 * k + 4) * 2.0**-24 + (0 if dtype is torch.float32 else info.eps / 2) + 2.0**-40
    bound = x.double().abs() * off + (k * 2.0**-149 if dtype is torch.float32 else info.tiny * info.eps)
    assert bool(((back.double() - x.double()).abs() <= bound).all())
    assert torch.equal(unpermute(permute(x, rows[:, :1].argsort(0).argsort(0)), rows[:, :1].argsort(0).argsort(0)), x)


@examples(times=3)
@given(
    tokens=st.integers(1, 30), k=st.integers(1, 5), dim=st.integers(1, 200), spare=st.integers(-10, 10),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000),
)  # fmt: skip
def test_unpermute_and_its_gradient_are_as_accurate_as_derived(
    tokens: int, k: int, dim: int, spare: int, dtype: torch.dtype, seed: int
) -> None:
    """(k + 1)·u·Σ|w·y| for k products and additions; (c + 1)·u·Σ|do·y| for dw, c = ⌈D/64⌉ + 6; dy is a product."""
    num_rows = max(tokens * k + spare, 1)
    rows = random_rows(tokens, k, num_rows, seed)
    y, g = tensor((num_rows, dim), dtype, seed), tensor((tokens, dim), dtype, seed + 1)
    w = tensor((tokens, k), torch.float32, seed + 2)
    kept = (rows >= 0).double()
    taken = y.double()[rows.clamp(min=0)] * kept[..., None]
    u, info = 2.0**-24, torch.finfo(dtype)
    half, tiny = (0.0, 2.0**-140) if dtype is torch.float32 else (info.eps / 2, info.tiny * info.eps)
    terms = w.double()[..., None] * taken
    bound = (k + 1) * u * terms.abs().sum(1)
    off = (unpermute(y, rows, w).double() - terms.sum(1)).abs()
    assert bool((off <= bound + (terms.sum(1).abs() + bound) * half + tiny).all())
    dy, dw = unpermute_backward(g, y, rows, w)
    products = taken * g.double()[:, None]
    bound = (-(-dim // 64) + 7) * u * products.abs().sum(-1)
    assert bool(((dw.double() - products.sum(-1)).abs() <= bound + 2.0**-140).all())
    exact = torch.zeros(num_rows, dim, dtype=torch.float64)
    token, choice = (rows >= 0).nonzero(as_tuple=True)
    exact[rows[token, choice]] = (w.double()[..., None] * g.double()[:, None])[token, choice]
    assert bool(((dy.double() - exact).abs() <= exact.abs() * (u + half) * 1.01 + tiny).all())


def test_gradients_there_and_back() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = random_rows(6, 3, 16, 0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    x, y, w = leaf(6, 4), leaf(16, 4), leaf(6, 3)
    assert torch.autograd.gradcheck(lambda x: permute(x, rows, num_rows=16), (x,))
    assert torch.autograd.gradcheck(lambda y: unpermute(y, rows), (y,))
    assert torch.autograd.gradcheck(lambda y, w: unpermute(y, rows, w), (y, w))

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return unpermute(permute(x, rows, num_rows=16).tanh(), rows, w).square().sum()

    def indexing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((w * (rows >= 0))[..., None] * x.tanh()[:, None]).sum(1).square().sum()

    theirs = torch.autograd.grad(indexing(x, w), (x, w))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, w)]
        for a, b in zip(torch.autograd.grad(chain(*leaves), leaves), theirs, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_a_whole_layer_trains_as_one_written_with_indexing() -> None:
    """Gate, places, permute, one matrix an expert, unpermute: the gradients of a dense sum over the experts."""
    generator = torch.Generator().manual_seed(3)
    tokens, experts, dim, k = 20, 4, 8, 2
    x, router = torch.randn(tokens, dim, generator=generator), torch.randn(dim, experts, generator=generator)
    matrices = torch.randn(experts, dim, dim, generator=generator)
    leaves = [t.requires_grad_() for t in (x, router, matrices)]
    gate = top_k_gate(x @ router, k, renormalise=True)
    at = positions_in_expert(gate.indices, experts, capacity=tokens)
    rows = expert_rows(gate.indices, at, padded=True)
    groups = permute(x, rows, num_rows=experts * tokens).view(experts, tokens, dim)
    out = unpermute(torch.bmm(groups, matrices).view(-1, dim), rows, gate.probabilities)
    p = torch.softmax(x @ router, -1)
    chosen = torch.zeros_like(p).scatter(-1, torch.topk(p, k).indices, 1.0) * p
    dense = torch.einsum("te,td,edf->tf", chosen / chosen.sum(-1, keepdim=True), x, matrices)
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(o.square().sum(), leaves) for o in (out, dense))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


# What users do wrong --------------------------------------------------------------------------------------------------

V, X, Y = torch.ones(3, 4), torch.ones(3, 5), torch.ones(6, 5)
N, R, W = torch.tensor([[0, 1], [2, 3], [0, 3]]), torch.arange(6).view(3, 2), torch.ones(3, 2)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: top_k_gate(V.int(), 1), "logits is .*[iI]nt"),
    (lambda: top_k_gate(V[0], 1), "logits has shape .*4.*2 dims"),
    (lambda: top_k_gate(V.t(), 1), "logits of shape .*4, 3.* has strides"),
    (lambda: top_k_gate(V, 0), "k is 0; it must be between 1 and the number of experts, here 4"),
    (lambda: top_k_gate(V, 5), "k is 5; .*here 4"),
    (lambda: top_k_gate_backward(W, V, N - 1), r"indices\[0, 0\] is -1; it must be at least 0 .*here 4"),
    (lambda: top_k_gate_backward(W.half(), V, N), "grad_probabilities is"),
    (lambda: top_k_gate_backward(W, V[:2], N), r"indices has shape .*3, 2.*must be \(2, at most 4\)"),
    (lambda: positions_in_expert(N.int(), 4), "indices is .*[iI]nt.*torch.int64"),
    (lambda: positions_in_expert(N[0], 4), "indices has shape .*2 dims"),
    (lambda: positions_in_expert(N.t(), 4), "indices of shape .*strides"),
    (lambda: positions_in_expert(N, 3), r"indices\[1, 1\] is 3; .*number of experts, here 3"),
    (lambda: positions_in_expert(N, 0), "num_experts is 0"),
    (lambda: positions_in_expert(N, 4, capacity=-1), "capacity is -1"),
    (lambda: positions_in_expert(N, 4, priority="first"), "priority is 'first'"),  # type: ignore[arg-type]
    (lambda: positions_in_expert(N, 4, priority=W[:2]), r"priority has shape .*2, 2.*must be .*3, 2"),
    (lambda: positions_in_expert(N, 4, capacity=1, priority=N), "priority is .*(Long|int64)"),
    (lambda: positions_in_expert(N, 4, capacity=1, priority=torch.ones(2, 3).t()), "priority of shape .*strides"),
    (lambda: positions_in_expert(N, 4, capacity=1, priority=W.to("meta")), "priority is on meta"),
    (lambda: positions_in_expert(N, 3, capacity=1, priority=W), r"indices\[1, 1\] is 3; .*number of experts, here 3"),
    (lambda: expert_rows(N, positions_in_expert(N, 4), padded=True), "no capacity"),
    (lambda: expert_rows(N[:2], positions_in_expert(N, 4)), r"indices has shape \(2, 2\)"),
    (lambda: permute(X.long(), R), "x is .*(Long|int64)"),
    (lambda: permute(X, R[:2]), r"rows has shape .*2, 2.*must be \(3, k\)"),
    (lambda: permute(X, R, num_rows=5), r"rows\[2, 1\] is 5; .*less than the number of rows, here 5"),
    (lambda: permute(X, R - 2), r"rows\[0, 0\] is -2"),
    (lambda: permute(X, R % 3), r"rows\[1, 1\] is 0, which an assignment before it has already"),
    (lambda: permute(X, torch.full((3, 2), -1), num_rows=-1), "num_rows is -1"),
    (lambda: permute(X, R.to("meta")), "rows is on meta"),
    (lambda: unpermute(Y, R + 1), r"rows\[2, 1\] is 6"),
    (lambda: unpermute(Y, R, W[:2]), "weights has shape .*2, 2"),
    (lambda: unpermute(Y, R, W.int()), "weights is .*[iI]nt"),
    (lambda: unpermute(Y, R, W.double()), "weights is torch.float64; allowed are torch.float32"),
    (lambda: unpermute(Y[:, ::2], R), "y of shape .*6, 3.*strides"),
    (lambda: unpermute(Y, R, W.to("meta")), "weights is on meta"),
    (lambda: unpermute_backward(Y, Y, R, W), "grad_out has shape .*6, 5.*must be .*3, 5"),
    (lambda: unpermute_backward(X, Y, R % 3, W), r"rows\[1, 1\] is 0, which"),
]


@MODES
@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_mistakes_are_value_errors_with_the_numbers(
    wrong: Callable[[], Any], message: str, mode: str, use_mode: UseMode
) -> None:
    use_mode(mode)
    with pytest.raises(ValueError, match=message):
        wrong()


# What torch asks of an operator ---------------------------------------------------------------------------------------


@pytest.mark.dear
def test_opcheck() -> None:
    zoo, check = torch.ops.zoo, torch.library.opcheck
    v, x, y, w = (t.clone().requires_grad_() for t in (torch.rand(3, 4), X, Y, W))
    for renormalise in (False, True):
        check(zoo.top_k_gate.default, (v, 2, renormalise))
        check(zoo.top_k_gate_backward.default, (W, V, N, renormalise))
    check(zoo.positions_in_expert.default, (N, 4, None, True, None))
    check(zoo.positions_in_expert.default, (N, 4, 1, False, None))
    check(zoo.positions_in_expert.default, (N, 4, 1, False, W))
    check(zoo.permute.default, (x, R, 7))
    check(zoo.unpermute.default, (y, R, None))
    check(zoo.unpermute.default, (y, R, w))
    check(zoo.unpermute_backward.default, (X, Y, R, W))


def test_it_compiles_without_a_break() -> None:
    def layer(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        gate = top_k_gate(logits, 2, renormalise=True)
        at: Positions = positions_in_expert(gate.indices, 4, capacity=3, priority=gate.probabilities)
        rows = expert_rows(gate.indices, at, padded=True)
        return unpermute(permute(x, rows, num_rows=12) * 2.0, rows, gate.probabilities)

    x, logits = torch.randn(6, 5), torch.randn(6, 4, requires_grad=True)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, logits), layer(x, logits), rtol=0, atol=0)
