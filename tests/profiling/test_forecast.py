"""One cost model: what zoo.cost forecasts that a transformer computes is what runs and is counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.profiling.test_counts import profiled
from tests.profiling.test_transformers import logits_of

from zoo.cost import Transformer, backward_of, forward_of_layer
from zoo.cost.reading import transformer_of
from zoo.cost.transformer import Product

transformers = pytest.importorskip("transformers")
BATCH = 2


def shapes(kind: str, heads: int, groups: int, layers: int, wide: int, vocab: int, seq: int) -> Any:
    hidden = 8 * heads
    if kind == "GPT2":
        return transformers.GPT2Config(
            n_embd=hidden, n_head=heads, n_layer=layers, n_inner=8 * wide, vocab_size=vocab, n_positions=seq,
            attn_implementation="eager", bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    return transformers.LlamaConfig(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=heads // groups, num_hidden_layers=layers,
        intermediate_size=8 * wide, vocab_size=vocab, max_position_embeddings=seq, attn_implementation="eager",
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def flops_of(operations: Any) -> int:
    return sum(one.flops for one in operations if isinstance(one, Product))


@examples(times=0.1, quick=1)
@given(
    kind=st.sampled_from(["GPT2", "Llama"]), heads=st.sampled_from([2, 4]), groups=st.sampled_from([1, 2]),
    layers=st.integers(1, 3), wide=st.integers(1, 6), vocab=st.integers(5, 40), seq=st.integers(2, 9),
)  # fmt: skip
def test_products_of_a_transformer_are_those_that_are_forecast(
    kind: str, heads: int, groups: int, layers: int, wide: int, vocab: int, seq: int
) -> None:
    config = shapes(kind, heads, groups, layers, wide, vocab, seq)
    model: Transformer = dataclasses.replace(transformer_of(config.to_dict(), seq=seq), attention="eager")
    net = (transformers.GPT2LMHeadModel if kind == "GPT2" else transformers.LlamaForCausalLM)(config)
    ids = torch.zeros(BATCH, seq, dtype=torch.int64)
    found = profiled(logits_of(net.train()), input_ids=ids, use_cache=False, backward=True).model
    layer = list(forward_of_layer(model, BATCH))
    head = 2 * BATCH * seq * model.hidden * vocab
    rotary = 0 if kind == "GPT2" else 2 * seq * model.dim // 2
    assert found.forward.flops - (layers * flops_of(layer) + head) in (0, rotary)
    back = [part for one in layer for part in backward_of(one)]
    assert found.backward.flops == layers * flops_of(back) + 2 * head
    assert found.parameters.numel == model.parameters
