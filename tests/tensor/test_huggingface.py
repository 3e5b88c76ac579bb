"""Styles that models of transformers ship are read as rules; what rules cannot say is told by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
import transformers
from tests.tensor.hub import EXPERTS, GROUPED, NO_TOKENS, model_of

from zoo.tensor import Rule, plan_of, prove
from zoo.tensor.huggingface import of_styles

STYLED = {
    "glm4_moe_lite": "Glm4MoeLite",
    "cohere": "Cohere",
    "glm": "Glm",
    "granite": "Granite",
    "olmo2": "Olmo2",
    "starcoder2": "Starcoder2",
}

LATENT = {
    **EXPERTS, "num_key_value_heads": 9, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def styled(name: str) -> Any:
    kind, config = getattr(transformers, f"{STYLED[name]}ForCausalLM"), getattr(transformers, f"{STYLED[name]}Config")
    with torch.device("meta"):
        return kind(config(**{**NO_TOKENS, **GROUPED, **(LATENT if "moe" in name else {})}))


@pytest.mark.matrix
@pytest.mark.parametrize("name", STYLED)
def test_models_of_no_family_are_split_by_the_styles_that_they_ship(name: str) -> None:
    model = styled(name)
    found = prove(model, model.config, plan_of(model), 2)
    assert max(found.outputs, found.gradients or 0.0) < 1e-13


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gptj", "mixtral", "qwen3", "qwen3_moe"])
def test_styles_say_the_same_of_matrices_as_families_do(name: str) -> None:
    model = model_of(name)
    family, styles = plan_of(model), of_styles(model)
    assert {str(rule) for rule in styles.rules} == {str(rule) for rule in family.rules}
    assert dict(styles.sizes) == dict(family.sizes)
    assert set(styles.counts) == set(family.counts)
    assert styles.layers == family.layers


class Styled(nn.Module):
    """Two linear layers of attention, one embedding, and a ``tp_plan``."""

    base_model_prefix = "model"

    def __init__(self, styles: dict[str, str], num_heads: int = 4) -> None:
        super().__init__()
        self.tp_plan = styles
        self.words, self.attn = nn.Embedding(11, 8), nn.Module()
        self.attn.q_proj, self.attn.g_proj, self.attn.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.attn.num_heads = num_heads
        self.config = transformers.LlamaConfig(vocab_size=11, num_attention_heads=4, hidden_size=8)
        self.config.model_type = "own"

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize(
    ("style", "rule"),
    [
        ("colwise", Rule(module="attn.q_proj", rows="head dim", cut="head")),
        ("packed_colwise", Rule(module="attn.q_proj", rows="part=2 inner", cut="inner")),
        ("colwise_gather_output", Rule(module="attn.q_proj", rows="out", cut="out", gather=True)),
        ("colwise_rep", Rule(module="attn.q_proj", rows="out", cut="out", gather=True)),
        ("rowwise", Rule(module="attn.q_proj", columns="head dim", cut="head")),
        ("packed_rowwise", Rule(module="attn.q_proj", columns="part=2 inner", cut="inner")),
        ("rowwise_split_input", Rule(module="attn.q_proj", columns="inner", cut="inner", scatter=True)),
        ("rowwise_rep", Rule(module="attn.q_proj", columns="inner", cut="inner", scatter=True)),
        ("replicated_with_grad_allreduce", Rule(module="attn.q_proj", partial=True)),
    ],
)
def test_every_style_is_a_rule(style: str, rule: Rule) -> None:
    plan = plan_of(Styled({"attn.q_proj": style, "attn.g_proj": "replicate", "attn.out": "local_params"}))
    assert plan.rules == (Rule(module="words", rows="vocab", cut="vocab"), rule)
    counts = [] if rule.gather else [("num_heads", "head")]  # heads are whole where outputs are gathered
    assert [(count.attribute, count.dims) for count in plan.counts] == counts


@pytest.mark.parametrize(
    "style",
    ["all_reduce", "embedding_colwise", "moe_identity_expert", "sequence_parallel", "own_style"],
)
def test_styles_that_rules_cannot_say_are_refused_by_name(style: str) -> None:
    with pytest.raises(ValueError, match=f"style '{style}' for attn.out, which rules cannot say; they can say colwise"):
        plan_of(Styled({"attn.q_proj": "colwise", "attn.out": style}))


def test_styles_within_experts_are_one_rule() -> None:
    model = model_of("mixtral")
    model._tp_plan |= {"model.layers.*.mlp.experts.down_proj": "replicate"}  # type: ignore[operator, assignment]
    with pytest.raises(ValueError, match=r"style 'replicate' for .*down_proj, within experts, where rules can say col"):
        of_styles(model)


def test_what_is_not_known_is_told() -> None:
    with pytest.raises(ValueError, match="no configuration with a model_type"):
        plan_of(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="ships no tensor-parallel plan"):
        plan_of(Styled({}))
    with pytest.raises(ValueError, match="for its vocabulary alone"):
        plan_of(Styled({"words": "embedding_rowwise"}))
    with pytest.raises(ValueError, match="does not say which rows are a head's"):
        plan_of(Styled({"attn.q_proj": "colwise", "attn.g_proj": "colwise"}))
    with pytest.raises(ValueError, match=r"attn\.num_heads is 8, and the configuration has 4 heads"):
        plan_of(Styled({"attn.q_proj": "colwise"}, num_heads=8))


def test_a_vocabulary_of_another_class_stays_whole_and_says_so() -> None:
    model = Styled({"attn.q_proj": "colwise"})
    model.words = nn.EmbeddingBag(11, 8)  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="words is a EmbeddingBag and no table of 11 words"):
        assert not any("vocab" in rule.rows for rule in plan_of(model).rules)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_of(Styled({"attn.q_proj": "colwise"}))
