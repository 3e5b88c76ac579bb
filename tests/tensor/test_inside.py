"""Modules that compute with parts of their own parameters, and outputs that heads of all ranks read."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo import sim
from zoo.comm import Communicator
from zoo.layout import boxes_of, split_of
from zoo.tensor import Plan, Rule, split


class Experts(nn.Module):
    """(E, 2I, C) and (E, C, I): y = Σ over experts of w_e down_e(tanh(gate_e x) · up_e x)."""

    def __init__(self, num: int = 3, inner: int = 5, width: int = 4) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(num, 2 * inner, width, dtype=torch.float64, generator=draw))
        self.down = nn.Parameter(torch.randn(num, width, inner, dtype=torch.float64, generator=draw))

    def forward(self, x: torch.Tensor, which: torch.Tensor, *, weights: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x.unsqueeze(-2), self.up.flatten(0, 1)).unflatten(-1, (len(self.up), -1)).chunk(2, -1)
        each = torch.einsum("tkei,eci->tec", gate.tanh() * up, self.down)
        return (each * weights.unsqueeze(-1) * F.one_hot(which, len(self.up)).unsqueeze(-1)).sum(-2)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.router, self.experts = nn.Linear(4, 3).double(), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        out: torch.Tensor = x + self.experts(x, weights.argmax(-1), weights=weights)
        return out


INSIDE = (("up", 1, "part=2 inner"), ("down", -1, "inner"))
PLAN = Plan("routed", rules=(Rule(module="experts", inside=INSIDE, cut="inner"),))


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_experts_in_parts_are_those_of_the_whole_model(degree: int) -> None:
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = Routed()
    expected = whole(x)
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}

    def fn(rank: int) -> None:
        comm, model = Communicator(), Routed()
        split(model, PLAN, comm)
        comm.log.reset()
        mine = x.clone().requires_grad_()
        y = model(mine)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        y.square().sum().backward()
        for name, parameter in model.named_parameters():
            box, grad = split_of(parameter).box, parameter.grad
            assert grad is not None
            for laid in boxes_of(box) if box is not None else ():
                there = gradients[name][laid.box.ranges]
                torch.testing.assert_close(grad[laid.here.ranges], there, rtol=1e-12, atol=1e-12, msg=name)
            if box is None:
                torch.testing.assert_close(grad, gradients[name], rtol=1e-12, atol=1e-12, msg=name)
        if degree > 1:  # the output in forward; the input and the weights of experts in backward
            assert comm.log.ops["all_reduce"].count == 3

    sim.run(degree, fn, seed=0)


class Latent(nn.Module):
    """Heads of a latent, and a key that all heads read: outputs of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.first, self.heads = nn.Linear(4, 5).double(), nn.Linear(3, 6).double()
            self.out = nn.Linear(6, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latent, key = self.first(x).split([3, 2], -1)
        heads = self.heads(latent).unflatten(-1, (-1, 2)) * key.unsqueeze(-2)
        out: torch.Tensor = self.out(heads.flatten(-2))
        return out


LATENT = Plan(
    "latent", (("head", 3), ("latent", 3), ("key", 2)),
    (Rule(module="first", outputs="(latent key)", cut="key"), Rule(module="heads", rows="head dim", cut="head"),
     Rule(module="out", columns="head dim", cut="head")),
)  # fmt: skip


def test_a_key_that_all_heads_read_has_the_gradient_of_all() -> None:
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = Latent()
    whole(x).square().sum().backward()

    def fn(rank: int) -> None:
        model = Latent()
        split(model, LATENT, Communicator())
        model(x).square().sum().backward()
        torch.testing.assert_close(model.first.weight.grad, whole.first.weight.grad, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(model(x), whole(x), rtol=1e-12, atol=1e-12)

    for degree in (1, 2, 3):
        sim.run(degree, fn, seed=0)


def told(model: nn.Module, plan: Plan, error: str) -> None:
    def fn(rank: int) -> None:
        with pytest.raises(ValueError, match=error):
            split(copy.deepcopy(model), plan, Communicator())

    sim.run(2, fn, seed=0)


def test_what_does_not_fit_is_told() -> None:
    def of(**fields: Any) -> Plan:
        return Plan("x", (("head", 4), ("kv", 2)), (Rule(module="experts", **fields),))

    told(Routed(), of(inside=INSIDE[:1], cut="inner"), "has the parameters up, down, and the rule for it names up")
    heads = (("up", 1, "kv dim"), ("down", 2, "inner"))
    with pytest.raises(ValueError, match="cuts 'kv', and has the dims 'inner'"):
        of(inside=heads, cut="kv")
    shared = Experts(inner=6)
    many = Plan(
        "x",
        (("head", 3), ("kv", 1)),
        (Rule(module="*", inside=(("up", 1, "(head kv) dim"), ("down", 2, "head dim")), cut="head"),),
    )
    told(nn.Sequential(shared), many, "which ranks may have in common, are cut in linear layers only")
    told(Routed(), of(own=(("sinks", 0, "head"),), cut="head"), "has the parameters up, down, .* names sinks")
    with pytest.raises(ValueError, match="cut \\(and once\\)"):
        Rule(module="experts", rows="inner", cut="inner", once=("bias",))
    missing = Plan("x", (("key", 2),), (Rule(module="first", outputs="(latent key)", cut="key"),))
    told(Latent(), missing, "no size for 'latent'")
    with pytest.raises(ValueError, match="outputs and cut, or partial alone"):
        Rule(module="first", outputs="(latent key)", rows="inner", cut="key")


def test_such_rules_go_out_as_data_and_come_back() -> None:
    more = Rule(module="experts", inside=INSIDE, once=("bias",), cut="inner")
    own = Rule(module="attention", own=(("sinks", 0, "head"),), cut="head")
    for plan in (PLAN, LATENT, Plan("x", (("head", 4),), (more, own))):
        assert Plan.of_data(json.loads(json.dumps(plan.as_data()))) == plan
    assert "experts: up dim 1 'part=2 inner', down dim -1 'inner', cut 'inner', outputs summed" in str(PLAN)
    assert str(more).endswith("cut 'inner', outputs summed, bias once")
    assert str(own) == "attention: sinks dim 0 'head', cut 'head'"
    assert "first: whole, of its outputs '(latent key)' gradients of 'key' are summed" in str(LATENT)
