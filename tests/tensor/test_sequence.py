"""Shares of tokens between blocks: few tokens, layers that are computed again, forwards in between, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.tensor import hub
from tests.tensor.gradients import whole_gradients
from tests.tensor.models import Decoder, Shape, plan_of
from torch import nn

from zoo import sim
from zoo.comm import Communicator
from zoo.tensor import plan_of as plan_of_model
from zoo.tensor import prove, split


@given(num_tokens=st.integers(1, 6), degree=st.integers(2, 4), training=st.booleans())
@example(num_tokens=1, degree=2, training=False)
@example(num_tokens=2, degree=4, training=True)
def test_any_number_of_tokens_has_the_gradients_of_the_whole_model(
    num_tokens: int, degree: int, training: bool
) -> None:  # fmt: skip
    """Some ranks have none where there are fewer than ranks."""
    shape = Shape(heads=4, kv=4, bias=False)
    ids = torch.randint(shape.vocab, (2, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
    whole = Decoder(shape).train(training)
    expected = whole(ids)
    expected.square().sum().backward()

    def fn(rank: int) -> None:
        model, comm = Decoder(shape).train(training), Communicator()
        split(model, plan_of(shape), comm, sequence=True)
        found = model(ids)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
        found.square().sum().backward()
        grads = whole_gradients(model, comm)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-10, msg=name)

    sim.run(degree, fn, seed=0)


def recomputing(name: str, reentrant: bool) -> Any:
    """A model with dropout that computes its layers again."""
    more = {"attention_dropout": 0.3} if name == "llama" else {}
    model: Any = hub.model_of(name, **more).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


IDS = torch.randint(53, (2, 5), generator=torch.Generator().manual_seed(0))


def trained(model: Any, *, between: bool) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        loss = model(IDS, labels=IDS).loss
        if between:  # a look at other tokens before the backward
            model.eval()
            with torch.no_grad():
                model(IDS[:, :3])
            model.train()
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.matrix
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_that_transformers_computes_again_have_their_tokens(name: str, reentrant: bool) -> None:
    """It computes a layer's forward again, around hooks of the module; masks of dropout are those of one process."""
    expected = trained(recomputing(name, reentrant), between=False)

    def fn(rank: int) -> None:
        model, comm = recomputing(name, reentrant), Communicator()
        split(model, plan_of_model(model), comm, sequence=True)
        trained(model, between=True)
        for path, grad in whole_gradients(model, comm).items():
            torch.testing.assert_close(grad, expected[path], rtol=1e-6, atol=1e-8, msg=path)

    sim.run(2, fn, seed=0)


@pytest.mark.matrix
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lengths", [(5, 6), (6, 5, 2), (4, 1)])
def test_layers_that_are_computed_again_have_the_tokens_of_their_own_forward(
    lengths: tuple[int, ...], reentrant: bool
) -> None:  # fmt: skip
    """Of 5 tokens and of 6 the first rank has 3: which of them a layer had cannot be told from its share alone."""
    ids = torch.randint(53, (2, max(lengths)), generator=torch.Generator().manual_seed(0))

    def step(model: Any) -> dict[str, torch.Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            losses = [model(ids[:, :length]).logits.sin().sum() for length in lengths]
            losses[0].backward(retain_graph=True)
            torch.stack(losses[1:]).sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = step(recomputing("llama", reentrant))

    def fn(rank: int) -> None:
        model, comm = recomputing("llama", reentrant), Communicator()
        split(model, plan_of_model(model), comm, sequence=True)
        step(model)
        for path, grad in whole_gradients(model, comm).items():
            torch.testing.assert_close(grad, expected[path], rtol=1e-6, atol=1e-8, msg=path)

    sim.run(2, fn, seed=0)


def test_hooks_for_a_backward_see_one_gradient_of_what_a_block_gathers() -> None:
    """They give modules views of what these get."""
    whole = hub.model_of("llama")
    expected = trained(whole, between=False)

    def fn(rank: int) -> None:
        model, comm, seen = hub.model_of("llama"), Communicator(), []
        split(model, plan_of_model(model), comm, sequence=True)
        for module in model.modules():
            module.register_full_backward_hook(lambda *_: seen.append(1))
        trained(model, between=False)
        assert seen
        for path, grad in whole_gradients(model, comm).items():
            torch.testing.assert_close(grad, expected[path], rtol=1e-6, atol=1e-8, msg=path)

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mixtral", r"model\.layers\.0\.mlp\.experts reads what is computed from all tokens"),
        ("deepseek_v3", r"kv_a_proj_with_mqa reads what is computed from all tokens"),
        ("opt", r"matrices of model\.decoder\.layers\.0 are not in modules of their own"),
    ],
)
def test_models_whose_blocks_cannot_gather_are_told(name: str, told: str) -> None:
    """Experts computed with tokens of other ranks in silence."""

    def fn(rank: int) -> None:
        model = hub.model_of(name)
        with pytest.raises(ValueError, match=told):
            split(model, plan_of_model(model), Communicator(), sequence=True)

    sim.run(2, fn, seed=0)


def test_a_module_of_a_block_without_a_rule_and_a_layer_by_itself_are_told() -> None:
    shape = Shape()

    def fn(rank: int) -> None:
        model: Any = Decoder(shape)
        model.blocks[0].perceptron.other = nn.LayerNorm(6)
        with pytest.raises(ValueError, match=r"in blocks\.0\.perceptron a LayerNorm without a rule sees all tokens"):
            split(model, plan_of(shape), Communicator(), sequence=True)
        model = Decoder(shape)
        split(model, plan_of(shape), Communicator(), sequence=True)
        x = torch.zeros(1, 4, 6, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"runs where the first of them has not.*Call the whole model"):
            model.blocks[1](x)
        model(torch.zeros(1, 4, dtype=torch.long))
        with pytest.raises(ValueError, match=r"a tensor of shape \(1, 4, 6\) where this rank has 2 tokens of 4"):
            model.blocks[1](x)

    sim.run(2, fn, seed=0)


def test_a_plan_is_proved_with_shares_of_tokens() -> None:
    model = hub.model_of("llama")
    proof = prove(model, model.config, plan_of_model(model), 2, sequence=True)
    assert proof.gradients is not None
    assert proof.gradients < 1e-12
    model = hub.model_of("mixtral")
    with pytest.raises(ValueError, match="reads what is computed from all tokens"):
        prove(model, model.config, plan_of_model(model), 2, sequence=True)
