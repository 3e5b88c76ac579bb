"""LoRA of peft on a model before it is split: losses and gradients are those of one process, at any degree."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.tensor import hub
from tests.tensor.gradients import whole_gradients

from zoo import sim
from zoo.comm import Communicator
from zoo.layout import split_of
from zoo.tensor import Parts, in_parts, plan_of, split, summary

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
IDS = torch.randint(53, (2, 5), generator=torch.Generator().manual_seed(0))
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h"],
}


def lora(name: str, targets: list[str], dropout: float = 0.0, **more: Any) -> Any:
    import peft  # for seconds: not where tests are collected

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=2,
            target_modules=targets,
            init_lora_weights=False,
            lora_dropout=dropout,
            **{"task_type": "CAUSAL_LM", **more},
        )
        whole: Any = hub.model_of(name, **({"tie_word_embeddings": False} if "lm_head" in targets else {}))
        return peft.get_peft_model(whole, config).double().train(dropout > 0)


def step(model: Any) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        loss: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return torch.stack([loss.detach().double(), torch.rand((), dtype=torch.float64)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[str], float, int]:
    name = draw(st.sampled_from(sorted(TARGETS)))
    targets = draw(st.lists(st.sampled_from(TARGETS[name]), min_size=1, unique=True))
    return name, targets, draw(st.sampled_from([0.0, 0.4])), draw(st.integers(2, 4))


@pytest.mark.dear
@examples(times=0.1)
@given(case=cases())
@example(case=("llama", TARGETS["llama"], 0.4, 4))
@example(case=("gpt2", TARGETS["gpt2"], 0.4, 2))
@example(case=("phi3", ["o_proj"], 0.0, 2))
def test_losses_and_gradients_are_those_of_one_process(case: tuple[str, list[str], float, int]) -> None:
    """Where heads are uneven too, and with masks on what an adapter gets: parts of it, or a whole tensor."""
    name, targets, dropout, degree = case
    whole = lora(name, targets, dropout)
    expected = step(whole)

    def fn(rank: int) -> None:
        model, comm = lora(name, targets, dropout), Communicator()
        split(model, plan_of(model), comm)
        torch.testing.assert_close(step(model), expected, rtol=1e-6, atol=1e-8)
        grads = whole_gradients(model, comm)
        for path, parameter in whole.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(grads[path], parameter.grad, rtol=1e-6, atol=1e-8, msg=path)

    sim.run(degree, fn, seed=0)


def test_an_adapter_is_switched_off_merged_and_copied() -> None:
    whole = lora("llama", ["q_proj", "o_proj"], modules_to_save=["lm_head"], layers_to_transform=[1])

    def fn(rank: int) -> None:
        mine = lora("llama", ["q_proj", "o_proj"], modules_to_save=["lm_head"], layers_to_transform=[1])
        split(mine, plan_of(mine), Communicator())
        other = copy.deepcopy(whole)

        def same() -> None:
            torch.testing.assert_close(mine(IDS).logits, other(IDS).logits, rtol=1e-6, atol=1e-8)

        same()
        with mine.disable_adapter(), other.disable_adapter():
            same()
        for model in (mine, other):
            model.merge_adapter()
        same()
        for model in (mine, other):
            model.unmerge_adapter()
        same()
        torch.testing.assert_close(copy.deepcopy(mine)(IDS).logits, other(IDS).logits, rtol=1e-6, atol=1e-8)
        with pytest.raises(ValueError, match="save_pretrained of a model that is split"):
            mine.save_pretrained("nowhere")

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize("task", ["CAUSAL_LM", None])
def test_what_is_sent_and_a_loss_in_parts(task: str | None) -> None:
    """The ways in of matrices that read one input stay one, with ways in between; the factors' sums are small."""
    model = lora("llama", ["q_proj", "o_proj"]).requires_grad_(True)
    forecast = summary(model, plan_of(model), 2)

    def fn(rank: int) -> None:
        mine, comm = lora("llama", ["q_proj", "o_proj"], task_type=task), Communicator()
        mine.requires_grad_(True)
        split(mine, plan_of(mine), comm)
        assert sum(split_of(p).partial != () for _, p in mine.named_parameters()) == 4  # keys and values: 9 / 3 heads
        in_parts(mine)
        comm.log.reset()
        found = mine(input_ids=IDS, labels=IDS)
        assert isinstance(found.logits, Parts)
        forward, backward = forecast.sent_bytes(IDS.numel(), 8)
        sums = comm.log.ops["all_reduce"]
        loss = IDS.numel() * 4 * 8
        assert sums.message_bytes == forward - forecast.gathered * IDS.numel() * 8 + loss
        before = sums.message_bytes
        found.loss.backward()
        assert sums.message_bytes - before == backward

    sim.run(2, fn, seed=0)


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("llama", {"use_dora": True}, r"q_proj has an adapter Linear that has no tensor-parallel plan"),
        ("llama", {"target_modules": ["embed_tokens"]}, "embed_tokens has an adapter Embedding"),
        ("llama", {"trainable_token_indices": [1]}, "embed_tokens has an adapter TrainableTokensWrapper"),
        ("mixtral", {"target_parameters": ["mlp.experts.down_proj"]}, "experts has an adapter ParamWrapper"),
    ],
)
def test_other_adapters_are_told(name: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan_of(lora(name, more.pop("target_modules", ["q_proj"]), **more))


def test_prompts_that_are_learnt_and_shares_of_tokens_are_told() -> None:
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="with learnt prompts has no tensor-parallel plan"):
        plan_of(peft.get_peft_model(hub.model_of("llama"), config))

    def fn(rank: int) -> None:
        model = lora("llama", ["q_proj"])
        with pytest.raises(ValueError, match="a Linear without a rule sees all tokens"):
            split(model, plan_of(model), Communicator(), sequence=True)
        after: Any = hub.model_of("llama")
        split(after, plan_of(after), Communicator())
        after = peft.get_peft_model(after, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        with pytest.raises(ValueError, match="q_proj is a Linear in the place of the layer that was split"):
            after(IDS)

    sim.run(2, fn, seed=0)


def test_a_wrapper_that_hides_a_family_is_told() -> None:
    """A plan of nothing split nothing in silence."""
    model: Any = hub.model_of("t5")
    with pytest.raises(ValueError, match="T5Stack has the model_type 't5', and no module where the plan"):
        plan_of(model.encoder)
