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

from zoo.cost import Layout, Transformer, backward_of, forward_of_layer, read_hardware, step_time
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


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_model_flops_of_attention_and_what_it_computes_again(kind: str) -> None:
    """Fused attention has the model FLOPs of attention that is written out, dense and causal; its scores in backward
    count as computed again, in HFU alone. The forecast of a step says the same as the profile of one."""
    config = shapes(kind, 4, 2, 2, 4, 24, 8)
    config._attn_implementation = "sdpa"
    fused = transformer_of(config.to_dict(), seq=8)
    net = (transformers.GPT2LMHeadModel if kind == "GPT2" else transformers.LlamaForCausalLM)(config)
    ids = torch.zeros(BATCH, 8, dtype=torch.int64)
    profile = profiled(logits_of(net.train()), input_ids=ids, use_cache=False, backward=True)
    found = profile.model
    layout, machine = Layout(global_batch=BATCH, micro_batch=BATCH), read_hardware("h100")
    time = step_time(fused, layout, machine)
    assert found.forward.flops + found.backward.flops == time.flops
    if kind == "Llama":  # GPT-2 has dropout there, for which the CPU has no fused attention
        assert found.forward.causal_flops + found.backward.causal_flops == time.causal_flops
        assert found.recomputation.flops == time.again_flops
        use = profile.utilisation(machine.device.peak("bf16"), seconds=time.step_s)
        assert (use.mfu, use.causal_mfu, use.hfu) == pytest.approx((time.mfu, time.causal_mfu, time.hfu))
    scores = 2 * BATCH * 4 * 8 * 8 * fused.dim
    assert time.again_flops == 2 * scores
    written = step_time(dataclasses.replace(fused, attention="eager"), layout, machine)
    assert (written.flops, written.causal_flops, written.again_flops) == (time.flops, time.causal_flops, 0)
    full = step_time(fused, dataclasses.replace(layout, recompute="full"), machine)
    assert full.flops == time.flops
    head = 3 * 2 * BATCH * 8 * fused.hidden * fused.vocab
    assert full.again_flops == pytest.approx((full.flops - head) / 3 + 2 * scores)
    assert time.mfu * time.step_s * machine.device.peak("bf16") == pytest.approx(time.flops)
    assert time.causal_mfu < time.mfu < time.hfu
