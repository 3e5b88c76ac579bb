"""The documented layer against the dense reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.moe import dense
from tests.profiles import examples
from torch import nn

from zoo.moe import MoE
from zoo.moe.noise import uniform
from zoo.moe.routing import capacity

WIDTH = 3


@dataclass(frozen=True)
class Case:
    tokens: int
    experts: int
    k: int
    factor: float
    minimum: int
    drops: bool
    rts: bool
    residual: bool
    masks: bool
    training: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    experts = draw(st.integers(1, 6))
    return Case(
        tokens=draw(st.sampled_from([0, 1, 2, 7, 13, 24])),
        experts=experts,
        k=draw(st.integers(1, experts)),
        factor=draw(st.sampled_from([0.25, 0.5, 1.0, 1.2, 4.0])),
        minimum=draw(st.sampled_from([0, 1, 4])),
        drops=draw(st.booleans()),
        rts=draw(st.booleans()),
        residual=draw(st.booleans()),
        masks=draw(st.booleans()),
        training=draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
    )


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)).double()


@pytest.mark.dear
@examples(times=8)
@given(cases())
def test_it_is_the_documented_mixture(case: Case) -> None:
    torch.manual_seed(case.seed)
    layer = MoE(
        WIDTH, expert(), case.experts, k=case.k, capacity_factor=case.factor, eval_capacity_factor=case.factor,
        min_capacity=case.minimum, drop_tokens=case.drops, use_rts=case.rts, use_residual=case.residual,
        top2_2nd_expert_sampling=False,
    ).double()  # fmt: skip
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.train(case.training)
    layer.gate.noise_key = torch.tensor(case.seed)
    x = torch.randn(case.tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    used = torch.rand(case.tokens) < 0.7 if case.masks else None
    output, loss, counts = layer(x, used)

    limit = dense.room(case.tokens, case.experts, case.factor * case.k, case.minimum) if case.drops else None
    draws = case.k == 1 and case.rts and case.training
    lots = uniform(torch.tensor(case.seed), (case.tokens, 1), salt=2).squeeze(1) if draws else None
    found = dense.mixture(
        x, layer.gate.weight, list(layer.experts.list), k=case.k, capacity=limit,
        used=None if used is None else used.tolist(), lots=lots,
    )  # fmt: skip
    expected = found.output
    if case.residual:
        c = torch.softmax(layer.coefficient(x), -1)
        expected = expected * c[:, :1] + layer.shared(x) * c[:, 1:]
    assert counts.tolist() == found.counts
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(loss, found.loss)
    if not case.tokens:
        return
    along = torch.randn_like(output)
    leaves = [x, *layer.parameters()]
    got = torch.autograd.grad((output * along).sum() + loss, leaves, allow_unused=True, materialize_grads=True)
    wanted = torch.autograd.grad(
        (expected * along).sum() + found.loss, leaves, allow_unused=True, materialize_grads=True
    )
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_capacity_is_computed_in_single_precision() -> None:
    assert capacity(25, 2, 1.2, 4) == 16  # 15.000000000000002 in float32, 15 in float64
    assert dense.room(25, 2, 1.2, 4) == 16


@examples(times=20)
@given(st.integers(0, 10**6), st.integers(1, 512), st.floats(0.1, 100))
def test_capacity_is_what_single_precision_gives(tokens: int, experts: int, factor: float) -> None:
    assert capacity(tokens, experts, factor, 4) == dense.room(tokens, experts, factor, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 3, "num_experts": 2}, "k=3 of 2 experts; k is from 1 to that number"),
        ({"k": 0}, "k=0 of 1 experts"),
        ({"num_experts": 6, "ep_size": 4}, "num_experts=6 with ep_size=4; ep_size divides the number of experts"),
        (
            {"noisy_gate_policy": "jitter"},
            "noisy_gate_policy='jitter'; allowed are 'Jitter', 'RSample', 'None' and None",
        ),
        ({"capacity_factor": 0.0}, "factors are positive"),
    ],
)
def test_what_cannot_be(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MoE(WIDTH, expert(), **options)  # type: ignore[arg-type]
