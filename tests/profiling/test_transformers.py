"""Models of transformers: FLOPs of their formulas, and the numbers that DeepSpeed documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.profiling.test_counts import profiled
from torch import nn

from zoo.profiling import Profile

transformers = pytest.importorskip("transformers")


def logits_of(model: nn.Module) -> nn.Module:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **kwargs: Any) -> Any:
            found = self.model(**kwargs)
            return found[0]

    return Logits()


@pytest.mark.parametrize(
    ("attention", "device"),
    [
        pytest.param("eager", "cpu", marks=pytest.mark.slow),
        ("sdpa", "cpu"),
        pytest.param("eager", "meta", marks=pytest.mark.slow),
    ],
)
def test_gpt2(attention: str, device: str) -> None:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=16, attn_implementation=attention,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        net = transformers.GPT2LMHeadModel(config)
        ids = torch.zeros(3, 10, dtype=torch.int64)
    # Without positions transformers looks at values, to find several sequences in a row.
    places = torch.arange(10, device=device).unsqueeze(0) if device == "meta" else None
    mask = torch.ones(3, 10, device=device) if device == "meta" else None
    found = profiled(
        logits_of(net), input_ids=ids, position_ids=places, attention_mask=mask, use_cache=False, backward=True
    )  # fmt: skip
    scores = 2 * 3 * 10 * 10 * 32 * 2
    assert found.model.forward.macs == 2 * 30 * 12 * 32 * 32 + scores + 30 * 32 * 61
    assert found.model.backward.macs == 2 * found.model.forward.macs
    tied = 61 * 32
    assert found.model.parameters.numel == tied + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    assert found.module("model.lm_head").forward.macs == 30 * 32 * 61


@pytest.mark.parametrize("attention", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
def test_llama_with_grouped_queries(attention: str) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, max_position_embeddings=32, attn_implementation=attention,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config)
    found = profiled(logits_of(net), input_ids=torch.zeros(3, 10, dtype=torch.int64), use_cache=False, backward=True)
    of_layer = 30 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 3 * 10 * 10 * 32 * 2
    # Rotary angles are 10 positions times 4 frequencies; releases of transformers write that as a product or not.
    rotary = found.module("model.model.rotary_emb").forward.macs
    assert rotary in (0, 40)
    assert found.model.forward.macs == 3 * of_layer + 30 * 32 * 61 + rotary
    assert found.model.backward.macs == 2 * (3 * of_layer + 30 * 32 * 61)
    if attention == "sdpa":
        seen = 10 * 11 // 2
        hidden = 3 * 3 * (100 - seen) * 32 * 2
        assert found.model.forward.causal_flops == found.model.forward.flops - 2 * hidden


def test_mixtral_counts_active_experts() -> None:
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    net = transformers.MixtralForCausalLM(config)
    found = profiled(logits_of(net), input_ids=torch.zeros(1, 10, dtype=torch.int64), use_cache=False)
    attention = 10 * (2 * 32 * 32 + 2 * 32 * 16) + 10 * 10 * 32 * 2
    experts = 10 * 32 * 8 + 10 * 2 * 3 * 32 * 48
    rotary = found.module("model.model.rotary_emb").forward.macs
    assert found.model.forward.macs == 2 * (attention + experts) + 10 * 32 * 61 + rotary
    of_experts = 2 * 8 * 3 * 32 * 48
    whole = found.model.parameters
    assert whole.numel - whole.active == of_experts * 3 // 4


@pytest.fixture(scope="module")
def bert_large() -> Profile:
    """DeepSpeed's example, BERT-Large, 80 sequences of 128 tokens, on meta."""
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=30528,
    )  # fmt: skip
    with torch.device("meta"):
        net = transformers.BertForPreTraining(config)
        ids = torch.zeros(80, 128, dtype=torch.int64)
    return profiled(logits_of(net), input_ids=ids)


@pytest.mark.dear
def test_the_documented_numbers_of_bert_large(bert_large: Profile) -> None:
    """The example of DeepSpeed's tutorial "Flops Profiler" (docs/_tutorials/flops-profiler.md at 80f8ecd).

    Its numbers are those of linear layers alone: two products of attention a layer, 64.4 G in all, are in none of them,
    and its head sees masked tokens only. Both are said here, and the rest is within 1 %.
    """

    def close(value: float, documented: float) -> bool:
        return abs(value / documented - 1) < 0.01

    def macs(path: str) -> int:
        return bert_large.module("model." + path).forward.macs

    scores = 24 * 80 * 128 * 128 * 1024 * 2
    assert close(bert_large.model.parameters.numel, 336.23e6)
    assert close(macs("bert.encoder") - scores, 3092.88e9)
    assert close(macs("bert.encoder.layer.0") - scores // 24, 128.87e9)
    assert close(macs("bert.encoder.layer.0.attention.self") - scores // 24, 32.23e9)
    for name in ("self.query", "self.key", "self.value", "output.dense"):
        assert close(macs("bert.encoder.layer.0.attention." + name), 10.74e9)
    assert close(macs("bert.encoder.layer.0.intermediate"), 42.95e9)
    assert close(macs("bert.encoder.layer.0.output"), 42.95e9)
    assert close(macs("cls.predictions.transform"), 10.74e9)
    layer = bert_large.module("model.bert.encoder.layer.0").parameters.numel
    assert close(layer, 12.6e6)
    decoder = 80 * 128 * 1024 * 30528
    masked = bert_large.model.forward.macs - scores - decoder  # without the decoder, which sees masked tokens there
    assert close(masked + 36.23e9, 3139.93e9)
