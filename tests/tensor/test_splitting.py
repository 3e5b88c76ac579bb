"""Split models compute what whole ones do: outputs, gradients, the sums they take; what does not fit is told."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.tensor.models import WIDTH, Decoder, Shape, plan_of
from torch import nn

from zoo import sim
from zoo.comm import Communicator
from zoo.layout import boxes_of, split_of
from zoo.tensor import Plan, Region, Rule, split


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv = draw(st.integers(1, 4))
    return Shape(
        heads=kv * draw(st.integers(1, 3)), kv=kv, inner=draw(st.integers(5, 9)), vocab=draw(st.integers(5, 11)),
        layers=draw(st.integers(1, 2)), layout=draw(st.sampled_from(["apart", "parts", "heads", "groups"])),
        bias=draw(st.booleans()), tied=draw(st.booleans()), norm=draw(st.booleans()), packed=draw(st.booleans()),
    )  # fmt: skip


def tokens(shape: Shape, seed: int = 3) -> torch.Tensor:
    return torch.randint(shape.vocab, (2, 5), generator=torch.Generator().manual_seed(seed))


def weights_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(5))


@pytest.mark.dear
@given(shape=shapes(), degree=st.integers(1, 5), training=st.booleans(), sequence=st.booleans())
@example(shape=Shape(heads=9, kv=3), degree=2, training=True, sequence=True)
@example(shape=Shape(heads=9, kv=3, layout="parts"), degree=4, training=False, sequence=False)
@example(shape=Shape(heads=6, kv=2, layout="groups"), degree=3, training=True, sequence=True)
def test_outputs_and_gradients_are_those_of_the_whole_model(
    shape: Shape, degree: int, training: bool, sequence: bool
) -> None:  # fmt: skip
    degree = min(degree, shape.heads)
    whole, ids = Decoder(shape), tokens(shape)
    logits = whole(ids)
    (logits * weights_of(logits)).sum().backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}

    def fn(rank: int) -> None:
        comm, model = Communicator(), Decoder(shape)
        split(model, plan_of(shape), comm, training=training, sequence=sequence)
        with torch.no_grad():
            torch.testing.assert_close(model(ids), logits, rtol=1e-12, atol=1e-12)
        found = model(ids)
        torch.testing.assert_close(found, logits, rtol=1e-12, atol=1e-12)
        (found * weights_of(found)).sum().backward()
        for name, parameter in model.named_parameters():
            said, grad = split_of(parameter), parameter.grad
            assert grad is not None
            if said.partial:
                comm.all_reduce(grad).wait()
            if said.box is None:
                torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12, msg=name)
            elif training:  # without it several ranks have parts of the same keys
                for laid in boxes_of(said.box):
                    there = expected[name][laid.box.ranges]
                    torch.testing.assert_close(grad[laid.here.ranges], there, rtol=1e-12, atol=1e-12, msg=name)

    sim.run(degree, fn, seed=0)


@pytest.mark.parametrize(("heads", "kv", "layout"), [(4, 4, "apart"), (4, 2, "apart"), (4, 2, "groups")])
def test_a_layer_takes_two_sums_each_way(heads: int, kv: int, layout: str) -> None:
    """Of (B, T, C) each; the embedding one in forward, with one row more, the head one in backward, and its outputs are
    gathered."""
    shape = Shape(heads=heads, kv=kv, layout=layout, layers=3, vocab=12)
    ids = tokens(shape)
    row = WIDTH * 8
    size = ids.numel() * row

    def fn(rank: int) -> None:
        comm, model = Communicator(), Decoder(shape)
        split(model, plan_of(shape), comm)
        comm.log.reset()
        logits = model(ids)
        sums = comm.log.ops["all_reduce"]
        assert (sums.count, sums.message_bytes) == (2 * 3 + 1, (2 * 3 + 1) * size + row)
        logits.square().sum().backward()
        assert (sums.count, sums.message_bytes) == (4 * 3 + 2, (4 * 3 + 2) * size + row)
        assert comm.log.ops["all_gather"].message_bytes == ids.numel() * shape.vocab * 8

    sim.run(2, fn, seed=0)


def test_parts_are_what_the_plan_says_and_take_their_own_memory() -> None:
    shape = Shape(heads=4, kv=2, vocab=13)

    def fn(rank: int) -> None:
        model, names = Decoder(shape), [name for name, _ in Decoder(shape).named_parameters()]
        identities = [id(parameter) for parameter in model.parameters()]
        split(model, plan_of(shape), Communicator())
        assert [name for name, _ in model.named_parameters()] == names
        assert [id(parameter) for parameter in model.parameters()] == identities
        assert model.head.weight is model.words.weight
        assert isinstance(model.blocks[0].attention.q, nn.Linear)
        assert model.words.num_embeddings == (7, 6)[rank]
        assert model.blocks[0].attention.out.in_features == 8
        for parameter in model.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.numel() * 8
        copied = copy.deepcopy(model)
        torch.testing.assert_close(copied(tokens(shape)), model(tokens(shape)), rtol=0, atol=0)

    sim.run(2, fn, seed=0)


def test_a_model_on_the_meta_device_is_split_without_values() -> None:
    shape = Shape(heads=4, kv=2)

    def fn(rank: int) -> None:
        with torch.device("meta"):
            model = Decoder(shape)
        split(model, plan_of(shape), Communicator())
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.blocks[0].attention.q.weight.shape == (8, WIDTH)

    sim.run(2, fn, seed=0)


def test_inputs_that_change_in_between_enter_again() -> None:
    """The way in is shared by projections of one input; an input that was written to is another one."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
                self.out = nn.Linear(4, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            x.mul_(2.0)
            out: torch.Tensor = self.out(y + self.b(x))
            return out

    rules = (Rule(module="a", rows="inner", cut="inner"), Rule(module="b", rows="inner", cut="inner"),
             Rule(module="out", columns="inner", cut="inner"))  # fmt: skip
    given = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()

    def gradient(model: Twice) -> torch.Tensor:
        x = given.detach().clone().requires_grad_()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            model(x.tanh()).square().sum().backward()
        model.a.weight.requires_grad_(False)  # so that nobody needs the values of before
        model(x.tanh() * 1.0).square().sum().backward()
        assert x.grad is not None
        return x.grad

    expected = gradient(Twice())

    def fn(rank: int) -> None:
        model = Twice()
        split(model, Plan("twice", rules=rules), Communicator())
        torch.testing.assert_close(gradient(model), expected, rtol=1e-12, atol=1e-12)

    sim.run(2, fn, seed=0)


def told(model: nn.Module, plan: Plan, error: str, degree: int = 2) -> None:
    def fn(rank: int) -> None:
        mine = copy.deepcopy(model)
        before = [(name, p.shape) for name, p in mine.named_parameters()]
        with pytest.raises(ValueError, match=error):
            split(mine, plan, Communicator())
        assert [(name, p.shape) for name, p in mine.named_parameters()] == before
        assert all(type(m) is type(n) for m, n in zip(mine.modules(), model.modules(), strict=True))

    sim.run(degree, fn, seed=0)


def test_what_does_not_fit_is_told_before_anything_changes() -> None:
    shape = Shape(heads=4, kv=2, inner=10, vocab=13)
    model, plan = Decoder(shape), plan_of(shape)
    told(model, plan, "degree is at most 4", degree=5)
    more = replace(plan, rules=(*plan.rules, Rule(module="blocks.*.gate", rows="inner", cut="inner")))
    told(model, more, "no such modules; it has words")
    again = Rule(module="blocks.0.perceptron.up", rows="inner", cut="inner")
    second = r"has the rule blocks\.0\.perceptron\.up: .*, and before it blocks\.\*\.perceptron\.up: .* the first one"
    told(model, replace(plan, rules=(*plan.rules, again)), second)
    other = replace(plan.rules[0], columns="width", rows="", cut="width")
    told(model, replace(plan, rules=(*plan.rules, other)), "the first one counts for words")
    told(model, replace(plan, sizes=(("head", 5),)), "makes multiples of")
    other = replace(plan, rules=(*plan.rules[:-1], Rule(module="head", columns="width", cut="width")))
    told(model, other, "one parameter, and the plan cuts it in two ways")
    untied = replace(plan, rules=plan.rules[:-1])
    told(model, untied, "head has the parameter of words, and no rule")
    told(model, replace(plan, rules=(Rule(module="blocks.*.first", rows="a", cut="a"),)), "is a LayerNorm")
    wrong = replace(plan, counts=(replace(plan.counts[0], attribute="n_head"),))
    told(model, wrong, "no attribute 'n_head'")

    def fn(rank: int) -> None:
        mine = copy.deepcopy(model)
        with pytest.raises(ValueError, match="multiples of 4"):
            split(mine, plan, Communicator(), grain=4)
        split(mine, plan, Communicator())
        with pytest.raises(ValueError, match="split already"):
            split(mine, plan, Communicator())
        with pytest.raises(IndexError, match="of a vocabulary of 13"):
            mine(torch.tensor([[1, 13]]))

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_of_nothing_goes_through(shape: tuple[int, int], overlap: bool) -> None:
    def fn(rank: int) -> None:
        model = Decoder(Shape())
        split(model, plan_of(Shape()), Communicator(), overlap=overlap)
        logits = model(torch.zeros(*shape, dtype=torch.int64))
        assert logits.shape == (*shape, Shape().vocab)
        logits.sum().backward()

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize("degree", [2, 3])
def test_sums_in_pieces_are_the_sums_and_begin_while_the_rest_is_computed(degree: int) -> None:
    """As many bytes, with a row of ids, in twice as many messages; the first is under way before the second product."""
    shape = Shape(heads=6, kv=2, layers=2, vocab=12)
    ids, size = tokens(shape), tokens(shape).numel() * WIDTH * 8

    def fn(rank: int) -> None:
        def made(overlap: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
            comm, model = Communicator(), Decoder(shape)
            split(model, plan_of(shape), comm, overlap=overlap)
            comm.log.reset()
            logits = model(ids)
            sums = comm.log.ops["all_reduce"]
            blocks = 2 * shape.layers
            assert (sums.count, sums.message_bytes) == (blocks * (1 + overlap) + 1, (blocks + 1) * size + WIDTH * 8)
            (logits * weights_of(logits)).sum().backward()
            return logits, {name: parameter.grad for name, parameter in model.named_parameters()}

        (whole, expected), (pieces, found) = made(False), made(True)
        torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        events: list[str] = []
        comm, x = Communicator(), torch.randn(5, 4, dtype=torch.float64)
        region, send = Region(comm), comm.all_reduce

        class Sent:
            def wait(self) -> None:
                events.append("waited")

        def all_reduce(tensor: torch.Tensor) -> Any:
            events.append(f"{len(tensor)} rows")
            send(tensor).wait()
            return Sent()

        region.pieces = 2
        comm.all_reduce = all_reduce  # type: ignore[method-assign, assignment]
        region.product(x, torch.randn(3, 4, dtype=torch.float64))
        assert events == ["3 rows", "2 rows", "waited", "waited"]
        with torch.autocast("cpu", torch.bfloat16):
            assert region.product(x.float(), torch.randn(3, 4)).dtype is torch.bfloat16

    sim.run(degree, fn, seed=0)
    with pytest.raises(ValueError, match="leave one of them out"):
        split(Decoder(shape), plan_of(shape), sim.run(1, lambda rank: Communicator())[0], sequence=True, overlap=True)


@pytest.mark.parametrize("cut", ["up", "down", "both"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_layer_that_gets_other_features_than_its_rule_says_names_itself(cut: str, overlap: bool) -> None:
    rows, columns = {"rows": "inner", "cut": "inner"}, {"columns": "inner", "cut": "inner"}
    rules = {"up": (Rule(module="0", **columns),), "down": (Rule(module="2", **columns),),
             "both": (Rule(module="0", **rows), Rule(module="2", **rows))}[cut]  # fmt: skip
    said = {
        "up": r"0 is row-parallel: it takes this rank's [32] of 5 features, and got 5\. The layer before",
        "down": r"2 is row-parallel: it takes this rank's 3 of 6 features, and got 6\. The layer before",
        "both": r"2 is column-parallel: it takes all 6 features, and got 3\. The layer before",
    }[cut]

    def fn(rank: int) -> None:
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        split(model, Plan("mine", rules=rules), Communicator(), overlap=overlap)
        with pytest.raises(ValueError, match=said):
            model(torch.ones(2, 5))

    sim.run(2, fn, seed=0)
