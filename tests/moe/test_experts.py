"""Experts on rows that are sorted: values and gradients, in every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo.moe import GroupedExperts, ModuleExperts
from zoo.moe.experts.grouped import ACTIVATIONS
from zoo.moe.experts.grouped_linear import grouped_linear
from zoo.moe.experts.grouped_mlp import BLOCK

WIDTH, HIDDEN = 3, 4
counts_ = st.lists(st.integers(0, 3), min_size=1, max_size=4)


def one_by_one(experts: GroupedExperts, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Each expert by itself, in plain torch."""
    found, end = [], 0
    phi = ACTIVATIONS[str(experts.activation)]
    for e, count in enumerate(counts):
        h = x[end : end + count] @ experts.up[e]
        h = h if experts.up_bias is None else h + experts.up_bias[e]
        h = phi(h[:, :HIDDEN]) * h[:, HIDDEN:] if experts.gated else phi(h)
        h = h @ experts.down[e]
        found.append(h if experts.down_bias is None else h + experts.down_bias[e])
        end += count
    return torch.cat([*found, torch.zeros_like(x[end:])])


@given(
    counts=counts_, tail=st.integers(0, 2), activation=st.sampled_from(sorted(ACTIVATIONS)), gated=st.booleans(),
    bias=st.booleans(), fused=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_grouped_experts_are_perceptrons(
    counts: list[int], tail: int, activation: str, gated: bool, bias: bool, fused: bool, seed: int
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    experts = GroupedExperts(len(counts), WIDTH, HIDDEN, activation=activation, gated=gated, bias=bias).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(sum(counts) + tail, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = one_by_one(experts, x, counts)
    experts.activation = activation if fused else ACTIVATIONS[activation]
    got = experts(x, torch.tensor(counts))
    torch.testing.assert_close(got, expected)
    along = torch.randn_like(got)
    leaves = [x, *experts.parameters()]
    mine = torch.autograd.grad((got * along).sum(), leaves)
    for a, b in zip(mine, torch.autograd.grad((expected * along).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("gated", [False, True])
def test_groups_of_more_than_a_block_of_rows(gated: bool) -> None:
    torch.manual_seed(0)
    counts = [BLOCK + 3, 0, 2 * BLOCK]
    experts = GroupedExperts(3, WIDTH, HIDDEN, activation="silu", gated=gated, bias=True).double()
    x = torch.randn(sum(counts), WIDTH, dtype=torch.float64, requires_grad=True)
    expected = one_by_one(experts, x, counts)
    got = experts(x, torch.tensor(counts))
    torch.testing.assert_close(got, expected)
    leaves = [x, *experts.parameters()]
    mine = torch.autograd.grad(got.square().sum(), leaves)
    for a, b in zip(mine, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_a_weight_gradient_is_summed_in_single_precision() -> None:
    """In 16 bits too, however many blocks of rows a group has."""
    counts = torch.tensor([4 * BLOCK])
    experts = GroupedExperts(1, 8, 8, activation="relu").bfloat16()
    with torch.no_grad():
        experts.up.fill_(1.0)
        experts.down.fill_(1.0)
    x = torch.full((4 * BLOCK, 8), 2.0**-10, dtype=torch.bfloat16)
    y = experts(x, counts)
    y.backward(torch.ones_like(y))
    assert experts.down.grad is not None
    torch.testing.assert_close(experts.down.grad, torch.full((1, 8, 8), 8 * 2.0**-10 * 4 * BLOCK).bfloat16())


@given(counts=counts_, bias=st.booleans())
def test_gradients_of_gradients(counts: list[int], bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(counts) + 1, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(len(counts), 2, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(len(counts), 3, dtype=torch.float64, requires_grad=True) if bias else None
    given: tuple[Any, ...] = (x, w, torch.tensor(counts), b)
    assert torch.autograd.gradcheck(grouped_linear, given)
    assert torch.autograd.gradgradcheck(grouped_linear, given)


@pytest.mark.dear
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0]])
def test_the_operations_are_known_to_compilers(counts: list[int]) -> None:
    ops = torch.ops.zoo_moe
    x, there = torch.randn(6, 4, requires_grad=True), torch.tensor(counts)
    up, down = torch.randn(3, 4, 8, requires_grad=True), torch.randn(3, 4, 4, requires_grad=True)
    torch.library.opcheck(ops.grouped_linear.default, (x, up, there, None))
    torch.library.opcheck(ops.grouped_weight_grad.default, (x, torch.randn(6, 5, requires_grad=True), there))
    torch.library.opcheck(ops.grouped_sum.default, (x, there))
    torch.library.opcheck(ops.grouped_mlp.default, (x, up, down, there, None, None, "silu", True))


def test_modules_see_their_own_rows_and_only_if_there_are_any() -> None:
    class Seen(nn.Module):
        rows: list[int]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows = x[:, 0].int().tolist()
            return x + 1

    made = [Seen() for _ in range(3)]
    experts = ModuleExperts(made)
    x = torch.arange(4.0).unsqueeze(1)
    assert experts(x, torch.tensor([1, 0, 2])).squeeze(1).tolist() == [1.0, 2.0, 3.0, 0.0]
    assert made[0].rows == [0]
    assert made[2].rows == [1, 2]
    assert not hasattr(made[1], "rows")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GroupedExperts(6, 2, 2, ep_size=4), r"6 experts on ep_size=4 ranks; .* one of \[1, 2, 3, 6\]"),
        (lambda: GroupedExperts(4, 2, 2, ep_size=2, ep_rank=2), "rank 2 of ep_size=2; it is from 0 to 1"),
        (lambda: GroupedExperts(2, 2, 2, activation="swish"), "activation='swish'; allowed are gelu, gelu_tanh, relu"),
        (lambda: ModuleExperts([nn.Identity()], 4, ep_size=2), "1 experts were given .* 2 are expected"),
    ],
)
def test_what_cannot_be(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
