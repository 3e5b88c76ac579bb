"""Every family: split models compute what whole ones do, and generate the same; plans are proved at all degrees."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from tests.tensor.hub import FAMILIES, class_of, config_of, model_of

from zoo import registry, sim
from zoo.comm import Communicator
from zoo.tensor import Plan, plan_of, prove, split
from zoo.tensor.shrinking import shrunken

DECODERS = [name for name in FAMILIES if name not in ("bert", "distilbert")]


def generated(model: Any) -> torch.Tensor:
    ids = torch.tensor([[1, 2, 7, 11, 13], [17, 19, 23, 29, 31]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    found: torch.Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
    )
    return found


def split_models_generate(name: str, degree: int) -> None:
    whole = model_of(name)
    copies = [copy.deepcopy(whole) for _ in range(degree)]
    expected = generated(whole)

    def fn(rank: int) -> None:
        split(copies[rank], plan_of(copies[rank]), Communicator(), training=False)
        torch.testing.assert_close(generated(copies[rank]), expected, rtol=0, atol=0)

    sim.run(degree, fn, seed=0)


@pytest.mark.matrix
@pytest.mark.parametrize("name", DECODERS)
def test_split_models_generate_what_whole_ones_do(name: str) -> None:
    """Left-padded, with a cache; six heads at degree 4, or nine at degree 2, do not divide."""
    split_models_generate(name, 2 if config_of(name).num_attention_heads == 9 else 4)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("degree", [2, 4])
def test_plans_of_families_are_proved(name: str, degree: int) -> None:
    model = model_of(name)
    found = prove(model, model.config, plan_of(model), degree)
    assert found.outputs < 1e-13
    assert found.gradients is not None
    assert found.gradients < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_families_at_all_degrees(name: str, attention: str) -> None:
    if attention == "sdpa" and not class_of(name)._supports_sdpa:
        pytest.skip("eager attention alone")
    config = config_of(name, attn_implementation=attention)
    model = model_of(name, attn_implementation=attention)
    for degree in (1, 2, 3, 4, 5):
        for training in (True, False):
            for grain in (1, 4):
                found = prove(class_of(name), config, plan_of(model), degree, training=training, grain=grain)
                assert max(found.outputs, found.gradients or 0.0) < 1e-13
        if name in DECODERS and attention == "eager":
            split_models_generate(name, degree)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plan_of_a_smaller_configuration_is_the_plan_with_smaller_sizes(name: str) -> None:
    config = config_of(name)
    family = registry.get("tensor_family", config.model_type)
    small = shrunken(config, family(config), degree=2)
    assert small.plan == family(small.config)


def test_every_family_is_tried() -> None:
    tried = {config_of(name).model_type for name in FAMILIES}
    refused = {"codegen", "reformer"}
    assert tried == set(registry.names("tensor_family")) - refused


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["bert", "bloom", "gpt2", "llama", "opt", "t5"])
def test_models_without_a_head_have_the_same_plan(name: str) -> None:
    model = model_of(name)
    base: Any = model.base_model
    if name == "t5":
        base = pytest.importorskip("transformers").T5EncoderModel(model.config).double().eval()
    plan, whole = plan_of(base), plan_of(model)
    assert plan.rules
    assert {rule.module.split(".")[-1] for rule in plan.rules} <= {r.module.split(".")[-1] for r in whole.rules}
    assert not any(rule.gather for rule in plan.rules)
    ids = torch.tensor([[1, 2, 3]])
    copies = [copy.deepcopy(base) for _ in range(2)]
    expected = base(ids)[0]

    def fn(rank: int) -> None:
        split(copies[rank], plan, Communicator())
        torch.testing.assert_close(copies[rank](ids)[0], expected, rtol=1e-6, atol=1e-6)

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "LlamaForQuestionAnswering"), ("t5", "T5ForTokenClassification")]
)  # fmt: skip
def test_a_base_model_under_another_name_has_the_plan_of_its_family(name: str, kind: str) -> None:
    """Nothing was split, and nobody told."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(pytest.importorskip("transformers"), kind)(config_of(name)).double().eval()
    ids, copies = torch.tensor([[1, 2, 3]]), [copy.deepcopy(model) for _ in range(2)]
    expected = model(ids)[0]

    def fn(rank: int) -> None:
        split(copies[rank], plan_of(model), Communicator())
        assert sum(p.numel() for p in copies[rank].parameters()) < 0.7 * sum(p.numel() for p in model.parameters())
        torch.testing.assert_close(copies[rank](ids)[0], expected, rtol=1e-6, atol=1e-6)

    sim.run(2, fn, seed=0)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "kind"), [("bert", "BertLMHeadModel"), ("gpt2", "GPT2LMHeadModel")])
@pytest.mark.parametrize("degree", [2, 4])
def test_a_decoder_looks_at_an_encoder(name: str, kind: str, degree: int) -> None:
    """Outputs, a step with what is kept of the encoder, and gradients, which the encoder gets too."""
    config = config_of(name, is_decoder=True, add_cross_attention=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(pytest.importorskip("transformers"), kind)(config).double().eval()
    plan = plan_of(model)
    proof = prove(model, config, plan, degree)
    assert proof.gradients is not None
    ids, states = torch.tensor([[1, 2, 3]]), torch.randn(1, 4, 48, dtype=torch.float64, requires_grad=True)
    copies = [copy.deepcopy(model) for _ in range(degree)]
    found = model(ids, encoder_hidden_states=states, use_cache=False).logits
    found.square().sum().backward()

    def fn(rank: int) -> None:
        split(copies[rank], plan, Communicator())
        mine = states.detach().clone().requires_grad_()
        out = copies[rank](ids, encoder_hidden_states=mine, use_cache=False).logits
        torch.testing.assert_close(out, found, rtol=1e-6, atol=1e-6)
        out.square().sum().backward()
        torch.testing.assert_close(mine.grad, states.grad, rtol=1e-5, atol=1e-6)

    sim.run(degree, fn, seed=0)


def test_families_say_what_they_cannot_do() -> None:
    def plan(name: str, **fields: Any) -> Plan:
        config = type("Config", (), {"model_type": name, **fields})
        return registry.get("tensor_family", name)(config)  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match="four cores"):
        plan("codegen")
    with pytest.raises(ValueError, match="share one projection"):
        plan("reformer")
    with pytest.raises(ValueError, match="slow_but_exact to false"):
        plan("bloom", slow_but_exact=True, pretraining_tp=2)
