"""Ranks with one seed drop what one process drops, at any degree, however attention is computed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.tensor.models import Attention, Decoder, Perceptron, Shape, plan_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zoo import sim
from zoo.comm import Communicator
from zoo.layout import boxes_of, split_of
from zoo.tensor import Plan, Rule, split
from zoo.tensor import plan_of as plan_of_model


class DroppingAttention(Attention):
    """``way``: "sdpa", "causal", "grouped" or "layer" (a Dropout layer over the weights)."""

    way = "sdpa"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.drop, self.after = nn.Dropout(0.4), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (h.transpose(-3, -2) for h in self.heads(x))
        rate = 0.4 if self.training else 0.0
        if self.way == "layer":
            mixed = self.drop((q @ k.mT / 2).softmax(-1)) @ v
        else:
            mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril() if self.way == "sdpa" else None
            mixed = F.scaled_dot_product_attention(q, k, v, mask, rate, self.way == "causal")
        out: torch.Tensor = self.after(self.out(mixed.transpose(-3, -2).flatten(-2)))
        return out


class DroppingPerceptron(Perceptron):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.drop(torch.tanh(self.up(x))))
        return out


def dropping(shape: Shape, way: str) -> Decoder:
    model = Decoder(shape)
    for block in model.blocks:
        block.attention.__class__ = type("Dropping", (DroppingAttention,), {"way": way})
        block.attention.drop, block.attention.after = nn.Dropout(0.4), nn.Dropout(0.3)
        block.perceptron.__class__ = DroppingPerceptron
        block.perceptron.drop = nn.Dropout(0.2)
    return model


def forward(model: Decoder, ids: torch.Tensor, recomputes: bool) -> torch.Tensor:
    x = model.words(ids)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
    out: torch.Tensor = model.head(model.last(x))
    return out


@pytest.mark.dear
@given(
    kv=st.integers(1, 3), each=st.integers(1, 2), degree=st.integers(2, 4), recomputes=st.booleans(),
    way=st.sampled_from(["sdpa", "causal", "layer"]), sequence=st.booleans(),
)  # fmt: skip
@example(kv=3, each=1, degree=2, recomputes=True, way="sdpa", sequence=False)
@example(kv=3, each=1, degree=2, recomputes=True, way="layer", sequence=True)
def test_masks_are_those_of_one_process(
    kv: int, each: int, degree: int, recomputes: bool, way: str, sequence: bool
) -> None:  # fmt: skip
    shape = Shape(heads=kv * each, kv=kv, inner=7, layers=2)
    degree = min(degree, shape.heads)
    ids = torch.randint(shape.vocab, (2, 5), generator=torch.Generator().manual_seed(1))

    def run(model: Decoder) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            out = forward(model, ids, recomputes)
            out.square().sum().backward()
            after = torch.rand(1)
        return torch.cat([out.detach().flatten(), after.double()])

    whole = dropping(shape, way)
    assert not torch.equal(run(whole), run(dropping(shape, way).eval()))
    whole.zero_grad()
    expected = run(whole)
    grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
    whole.eval()
    plain = forward(whole, ids, False)

    def fn(rank: int) -> None:
        model, comm = dropping(shape, way), Communicator()
        split(model, plan_of(shape), comm, sequence=sequence)
        model = copy.deepcopy(model)
        torch.testing.assert_close(run(model), expected, rtol=1e-11, atol=1e-12)
        for name, parameter in model.named_parameters():
            said, grad = split_of(parameter), parameter.grad
            assert grad is not None
            if said.partial:
                comm.all_reduce(grad).wait()
            if said.box is None:
                torch.testing.assert_close(grad, grads[name], rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
            for laid in boxes_of(said.box) if said.box is not None else ():
                there = grads[name][laid.box.ranges]
                torch.testing.assert_close(
                    grad[laid.here.ranges], there, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
                )
        model.eval()
        torch.testing.assert_close(forward(model, ids, False), plain, rtol=1e-11, atol=1e-12)

    sim.run(degree, fn, seed=0)


def test_what_cannot_be_told_is_refused_and_nothing_is_left() -> None:
    class Odd(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(self.up(x)[..., 1:] if self.training is None else self.drop(self.up(x).mT).mT)
            return out

    shape = Shape(inner=8)

    def fn(rank: int) -> None:
        model: Any = Decoder(shape)
        for block in model.blocks:
            block.perceptron.__class__ = Odd
            block.perceptron.drop = nn.Dropout(0.5)
        split(model, plan_of(shape), Communicator())
        ids = torch.zeros(2, 5, dtype=torch.long)
        with pytest.raises(ValueError, match=r"blocks\.0\.perceptron drops elements of a tensor of shape"):
            model(ids)
        assert F.dropout(torch.ones(3), 0.5, False).sum() == 3
        model.eval()
        model(ids)

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_of_bert_whose_ways_in_and_out_are_in_two_modules(way: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=7,
        max_position_embeddings=8, attention_probs_dropout_prob=0.4, hidden_dropout_prob=0.3, attn_implementation=way,
    )  # fmt: skip
    ids = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))

    def output(split_by: Any) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.BertForMaskedLM(config).double().train()
            if split_by is not None:
                split(model, plan_of_model(model), split_by)
            torch.manual_seed(7)
            found: torch.Tensor = model(ids).logits.detach()
            return torch.cat([found.flatten(), torch.rand(1, dtype=torch.float64)])

    expected = output(None)

    def fn(rank: int) -> None:
        torch.testing.assert_close(output(Communicator()), expected, rtol=1e-6, atol=1e-7)

    sim.run(2, fn, seed=0)


class Drawing(Perceptron):
    def __init__(self, shape: Shape, drop: nn.Module) -> None:
        super().__init__(shape)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.drop(torch.tanh(self.up(x))))
        return out


class Noise(nn.Module):
    dropout = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("drop", [nn.AlphaDropout(0.3), nn.RReLU(), Noise()])
def test_what_each_rank_would_draw_for_its_part_is_told(drop: nn.Module) -> None:
    """Ranks with equal parts and one seed would draw one mask for all of them."""
    shape = Shape(inner=10)

    def fn(rank: int) -> None:
        model = Decoder(shape)
        model.blocks[1].perceptron = Drawing(shape, copy.deepcopy(drop)).double()
        split(model, plan_of(shape), Communicator())
        ids = torch.zeros(2, 5, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"blocks\.1\.perceptron draws by \w+ for a tensor of shape \(2, 5, 5\)"):
            model(ids)
        if not isinstance(drop, Noise):
            model.eval()(ids)

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize("drop", [nn.Dropout1d(0.3), nn.FeatureAlphaDropout(0.3)])
def test_what_is_drawn_alike_for_all_features_is_that_of_one_process(drop: nn.Module) -> None:
    """One number for all features of a token."""
    shape, ids = Shape(inner=10), torch.zeros(2, 5, dtype=torch.int64)
    whole = Decoder(shape)
    whole.blocks[1].perceptron = Drawing(shape, drop).double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        expected = whole(ids)
    copies = [copy.deepcopy(whole) for _ in range(2)]

    def fn(rank: int) -> None:
        split(copies[rank], plan_of(shape), Communicator())
        torch.manual_seed(1)
        torch.testing.assert_close(copies[rank](ids), expected, rtol=1e-11, atol=1e-12)

    sim.run(2, fn, seed=0)


class Before(Perceptron):
    """What it gets is dropped, as wide as a rank's part of what is within."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.drop, self.fails = nn.Dropout(0.5), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(self.drop(x)))
        if self.fails:
            raise RuntimeError("no memory")
        out: torch.Tensor = self.down(self.drop(y))
        return out


def perceptrons() -> tuple[nn.Module, Plan, torch.Tensor]:
    shape = Shape(inner=12)  # six of each of two ranks, and six come in
    up = Rule(module="*.up", rows="inner", cut="inner")
    plan = Plan("perceptrons", rules=(up, Rule(module="*.down", columns="inner", cut="inner")))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(Before(shape), Before(shape)).double(), plan, torch.randn(3, 6, dtype=torch.float64)


@pytest.mark.parametrize("fails", [False, True])
def test_what_stops_in_its_midst_changes_no_later_mask(fails: bool) -> None:
    """A forward that fails, or that is computed again in backward as far as it is needed."""

    def gradients(model: Any) -> list[torch.Tensor]:
        if fails:
            model[1].fails = True
            with pytest.raises(RuntimeError, match="no memory"):
                model(given)
            model[1].fails = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            x = given if fails else given.detach().requires_grad_()
            for perceptron in model:
                x = perceptron(x) if fails else checkpoint(perceptron, x, use_reentrant=False)
            x.square().sum().backward()
            return [model(given), model[0].down.bias.grad]

    whole, plan, given = perceptrons()
    expected = gradients(whole)

    def fn(rank: int) -> None:
        mine, *_ = perceptrons()
        split(mine, plan, Communicator())
        torch.testing.assert_close(gradients(mine), expected, rtol=1e-9, atol=1e-11)

    sim.run(2, fn, seed=0)


def test_dropouts_that_stay_on_in_evaluation_draw_the_masks_of_one_process() -> None:
    def output(model: Any) -> torch.Tensor:
        model.eval()
        for perceptron in model:
            perceptron.drop.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            found: torch.Tensor = model(given)
            return found

    whole, plan, given = perceptrons()
    expected = output(whole)

    def fn(rank: int) -> None:
        mine, *_ = perceptrons()
        split(mine, plan, Communicator())
        torch.testing.assert_close(output(mine), expected, rtol=1e-9, atol=1e-11)

    sim.run(2, fn, seed=0)
