"""Careless uses of a split model: what would be wrong in silence is told, and what can be right is."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tensor import hub
from tests.tensor.models import Decoder, Perceptron, Shape, plan_of
from torch import nn
from torch.nn.utils import prune

from zoo import sim
from zoo.comm import Communicator
from zoo.layout import declare_split, split_of
from zoo.tensor import Count, Plan, Rule, parameters_on_meta, split
from zoo.tensor import plan_of as plan_of_model

SHAPE = Shape(vocab=12)  # parts of ranks have one shape
IDS = torch.randint(53, (2, 5), generator=torch.Generator().manual_seed(0))


def cut(model: Any, plan: Plan | None = None, **more: Any) -> Any:
    split(model, plan or plan_of(SHAPE), Communicator(), **more)
    return model


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_other_ids_on_some_ranks_are_told_on_all(seed: int, training: bool) -> None:
    ids = torch.randint(12, (2, 3), generator=torch.Generator().manual_seed(seed))

    def fn(rank: int) -> None:
        model = cut(Decoder(SHAPE))
        expected = model(ids)
        mine = ids.clone()
        if rank == 1:
            mine[0, 0], mine[0, 1] = ids[0, 1], ids[0, 0] + (ids[0, 0] == ids[0, 1])
        with torch.set_grad_enabled(training), pytest.raises(ValueError, match=r"ranks 1 of the .* other token ids"):
            model(mine)
        torch.testing.assert_close(model(ids), expected)

    sim.run(3, fn, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_that_compares_ids_changes_no_output(dtype: torch.dtype) -> None:
    shape = Shape(vocab=12, tied=False)
    ids = torch.arange(12).repeat(100)[None, :]
    table = Decoder(shape).to(dtype).words.weight

    def fn(rank: int) -> None:
        model = Decoder(shape).to(dtype)
        split(model, plan_of(shape), Communicator())
        found = model.words(ids)
        assert torch.equal(found, table[ids])
        found.sum().backward()
        grad = model.words.weight.grad
        assert grad is not None
        assert torch.equal(grad, torch.full_like(grad, 100))

    sim.run(2, fn, seed=0)


def test_parts_of_another_rank_are_not_loaded() -> None:
    def fn(rank: int) -> None:
        model, comm = cut(Decoder(SHAPE)), Communicator()
        everyone = comm.all_gather_object(model.state_dict())
        with torch.no_grad():
            model.last.weight.add_(1)
        model.load_state_dict(everyone[rank])
        assert torch.equal(model.last.weight, torch.ones_like(model.last.weight))
        with pytest.raises(
            RuntimeError, match=rf"words has the part of rank {1 - rank} of 2 .* this is rank {rank} of 2"
        ):
            model.load_state_dict(everyone[1 - rank])
        with pytest.raises(RuntimeError, match=r"words\.weight: this is the whole tensor, .* zoo\.tensor\.load"):
            model.load_state_dict(Decoder(SHAPE).state_dict())

    sim.run(2, fn, seed=0)


def test_what_is_made_of_a_split_model_says_what_it_is() -> None:
    def fn(rank: int) -> None:
        with parameters_on_meta():
            model = Decoder(Shape(vocab=12, tied=False))
        expected = [split_of(parameter) for parameter in cut(model).parameters()]
        assert any(said.axes for said in expected)
        for made in (model.to_empty(device="cpu"), model.half(), copy.deepcopy(model)):
            assert [split_of(parameter) for parameter in made.parameters()] == expected
        assert copy.copy(model.head).weight is model.head.weight

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize("sequence", [False, True])
def test_parameters_put_in_the_place_of_others_are_the_same_parts(sequence: bool) -> None:
    """By load_state_dict(assign=True), by hand, and tied again."""
    shape = Shape(heads=6, kv=3, vocab=12)  # keys stay whole at degree 2, and their gradients are summands

    def fn(rank: int) -> None:
        model = Decoder(shape)
        split(model, plan_of(shape), Communicator(), sequence=sequence)
        expected = {name: split_of(p) for name, p in model.named_parameters(remove_duplicate=False)}
        assert any(said.axes for said in expected.values())
        assert any(said.partial for said in expected.values())
        found = model(IDS % 12)
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        model.blocks[0].perceptron.up.weight = nn.Parameter(model.blocks[0].perceptron.up.weight.detach().clone())
        model.head.weight = model.words.weight
        assert {name: split_of(p) for name, p in model.named_parameters(remove_duplicate=False)} == expected
        assert torch.equal(model(IDS % 12), found)

    sim.run(2, fn, seed=0)


def test_other_parameters_than_those_of_the_split_are_told() -> None:
    def fn(rank: int) -> None:
        model = cut(Decoder(SHAPE))
        up, down = model.blocks[0].perceptron.up, model.blocks[0].perceptron.down
        with pytest.raises(ValueError, match=r"weight of shape \(10, 6\).* is this rank's part, of shape \(5, 6\)"):
            up.weight = nn.Parameter(torch.zeros(10, 6, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"weight .* is another part of a matrix"):
            up.weight = declared(nn.Parameter(torch.zeros_like(up.weight)))
        for change in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal):
            with pytest.raises(ValueError, match=r"has its parameter weight taken away, .* before zoo"):
                change(down)
        with pytest.raises(ValueError, match=r"weight_g .* before zoo\.tensor\.split"):
            nn.utils.weight_norm(up)

    sim.run(2, fn, seed=0)


def test_a_part_is_pruned_and_its_parameter_comes_back() -> None:
    def fn(rank: int) -> None:
        model = cut(Decoder(SHAPE))
        up = model.blocks[0].perceptron.up
        said = split_of(up.weight)
        prune.l1_unstructured(up, "weight", 3)
        model(IDS % 12).sum().backward()
        assert split_of(up.weight_orig) == said
        prune.remove(up, "weight")
        assert split_of(up.weight) == said
        assert int((up.weight == 0).sum()) == 3

    sim.run(2, fn, seed=0)


def test_layers_that_others_do_not_call_are_told() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

    def fn(rank: int) -> None:
        rule = Rule(module="attention.out_proj", columns="inner", cut="inner", scatter=True)
        with pytest.raises(ValueError, match=r"attention\.out_proj lies in a MultiheadAttention, which .* not call it"):
            split(Encoder(), Plan(name="x", rules=(rule,)), Communicator())

    sim.run(2, fn, seed=0)


def declared(parameter: nn.Parameter) -> nn.Parameter:
    declare_split(parameter, ["expert"])
    return parameter


def test_pickles_are_told() -> None:
    def fn(rank: int) -> None:
        model = cut(Decoder(SHAPE))
        for save in (pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
            with pytest.raises(NotImplementedError, match="a split model is not pickled"):
                save(model)
        torch.save(model.state_dict(), io.BytesIO())

    sim.run(2, fn, seed=0)


def test_methods_that_take_a_part_for_the_whole_are_told(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        whole = hub.model_of("llama").state_dict()
        for model in (cut(hub.model_of("llama"), PLAN), copy.deepcopy(cut(hub.model_of("llama"), PLAN))):
            with pytest.raises(ValueError, match=r"save_pretrained of a model that is split.*this rank's parts"):
                model.save_pretrained(tmp_path / "parts")
            with pytest.raises(ValueError, match=r"resize_token_embeddings of a model that is split"):
                model.resize_token_embeddings(60)
            with pytest.raises(ValueError, match=r"add_adapter of a model that is split .* add adapters before"):
                model.add_adapter(None)
            assert not (tmp_path / "parts").exists()
            if rank == 0:
                model.save_pretrained(tmp_path / "whole", state_dict=dict(whole))
        if rank == 0:
            found = hub.class_of("llama").from_pretrained(tmp_path / "whole", dtype=torch.float64)
            for name, value in found.state_dict().items():
                torch.testing.assert_close(value, whole[name])

    sim.run(2, fn, seed=0)


PLAN = plan_of_model(hub.model_of("llama"))


def test_a_layer_that_was_replaced_is_told() -> None:
    def fn(rank: int) -> None:
        for path in ("head", "blocks.1.attention.q", "blocks.0.perceptron.down", "words"):
            model = cut(Decoder(SHAPE))
            model.set_submodule(path, nn.Sequential(model.get_submodule(path)))
            with pytest.raises(ValueError, match=rf"{path} is a Sequential in the place of the layer that was split"):
                model(IDS % 12)

    sim.run(2, fn, seed=0)


def test_a_model_whose_layers_were_wrapped_or_have_gradients_is_told() -> None:
    changed = type("Linear", (nn.Linear,), {"forward": lambda self, x: x @ self.weight.T})

    def fn(rank: int) -> None:
        model: Any = Decoder(SHAPE)
        model.blocks[0].perceptron.up.__class__ = changed
        with pytest.raises(ValueError, match=r"blocks\.0\.perceptron\.up has a forward that was put in its place"):
            cut(model)
        model = Decoder(SHAPE)
        model.head.forward = lambda x: x
        with pytest.raises(ValueError, match="head has a forward that was put in its place"):
            cut(model)
        model = Decoder(Shape(vocab=12, tied=False))
        nn.utils.weight_norm(model.head)
        with pytest.raises(ValueError, match="head has the parameters weight_g, weight_v and makes its weight of them"):
            cut(model)
        model = Decoder(SHAPE)
        model(IDS % 12).sum().backward()
        with pytest.raises(ValueError, match=r"words\.weight has a gradient, of the whole of it"):
            cut(model)
        model.zero_grad()
        cut(model)(IDS % 12).sum().backward()

    sim.run(2, fn, seed=0)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_another_attention_of_a_split_model_is_that_of_all_its_layers(name: str) -> None:
    """Phi-3 counts heads in its configuration, of which each attention has one of its own."""

    def fn(rank: int) -> None:
        model: Any = hub.model_of(name, attn_implementation="sdpa")
        whole = copy.deepcopy(model)
        split(model, plan_of_model(model), Communicator())
        for mine in (model, copy.deepcopy(model)):
            mine.set_attn_implementation("eager")
            ways = {m.config._attn_implementation for m in mine.modules() if hasattr(m, "config")}
            assert ways == {"eager"}
            assert mine.config.num_attention_heads == whole.config.num_attention_heads
            found = mine(IDS, output_attentions=True)
            assert found.attentions[0].shape[1] < whole.config.num_attention_heads
            torch.testing.assert_close(found.logits, whole(IDS).logits, rtol=1e-4, atol=1e-5)  # a softmax in fp32

    sim.run(2, fn, seed=0)


def test_a_view_of_a_configuration_has_counts_of_its_own() -> None:
    class Config:
        heads, way = 4, "a"

    class Counting(Perceptron):
        def __init__(self, config: Config) -> None:
            super().__init__(SHAPE)
            self.config = config

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()
            self.mlp = Counting(self.config)

    def fn(rank: int) -> None:
        plan = Plan(name="x", sizes=(("head", 4), ("inner", 10)), counts=(
            Count(module="mlp", attribute="config.heads", dims="head"),
        ))  # fmt: skip
        model = cut(Model(), plan)
        assert (model.config.heads, model.mlp.config.heads) == (4, 2)
        assert isinstance(model.mlp.config, Config)
        model.config.way = "b"
        assert model.mlp.config.way == "b"
        model.mlp.config.heads = 3
        model.mlp.config.way = "c"
        assert (model.config.heads, model.config.way, model.mlp.config.heads) == (4, "c", 3)

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize("what", ["seed", "draw"])
def test_ranks_that_draw_other_masks_are_told(what: str) -> None:
    """``torch.manual_seed(seed + rank)``, or one number more on the rank that logs: residuals would differ."""

    def fn(rank: int) -> None:
        model: Any = Decoder(SHAPE)
        model.blocks[0].dropped = nn.Dropout(0.5)
        cut(model)
        model(IDS % 12)
        torch.manual_seed(3 + rank if what == "seed" else 3)
        if what == "draw" and rank == 0:
            torch.rand(1)
        for mine in (model, copy.deepcopy(model)):
            with pytest.raises(ValueError, match=r"ranks 1 of the .* draw other random numbers than rank 0"):
                mine(IDS % 12)
        model.eval()(IDS % 12)
        torch.manual_seed(4)
        model.train()(IDS % 12)
        cut(Decoder(SHAPE))(IDS % 12)
        torch.manual_seed(rank)
        cut(Decoder(SHAPE))(IDS % 12)  # nothing is dropped

    sim.run(2, fn, seed=0)
