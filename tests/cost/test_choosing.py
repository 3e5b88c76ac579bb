"""Layouts that fit, shapes of Hugging Face's configurations, goodput."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.cost import (
    Layout,
    Transformer,
    forecast_layout,
    goodput,
    layouts,
    memory_of,
    nearest,
    read_hardware,
    read_transformer,
    transformer_of,
)  # fmt: skip

A100 = read_hardware("a100-80")
SMALL = Transformer(hidden=2048, heads=16, layers=24, seq=2048, vocab=50_000, attention="flash")


@given(ranks=st.sampled_from([1, 2, 4, 6, 8, 16]), batch=st.sampled_from([16, 48, 64]))
def test_every_layout_is_one_of_these_ranks_and_fits_as_it_says(ranks: int, batch: int) -> None:
    found = layouts(SMALL, A100, ranks=ranks, global_batch=batch)
    assert len({f.layout for f in found}) == len(found)
    for f in found:
        assert f.layout.ranks == ranks
        assert f.fits == (memory_of(SMALL, f.layout).total <= 0.94 * (80 << 30))
    fitting = [f.time.step_s for f in found if f.fits]
    assert fitting == sorted(fitting)
    assert [f.fits for f in found] == sorted((f.fits for f in found), reverse=True)


@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 4]), st.integers(0, 3),
    st.sampled_from(["none", "full"]), st.integers(1, 4),
)  # fmt: skip
def test_more_of_anything_holds_no_less(
    tensor: int, data: int, pipeline: int, stage: int, recompute: Any, micro: int
) -> None:
    """A higher stage, recomputation and more ranks hold no more; a larger micro-batch no less."""
    sizes: dict[str, Any] = {"tensor": tensor, "data": data, "pipeline": pipeline, "global_batch": 8 * data * micro}
    found = memory_of(SMALL, Layout(**sizes, stage=stage, recompute=recompute, micro_batch=micro))
    parts = (found.parameters, found.gradients, found.states, found.activations, found.gathered, found.head)
    assert found.total == pytest.approx(sum(parts))
    if stage < 3:
        assert found.model_states >= memory_of(SMALL, Layout(**sizes, stage=stage + 1)).model_states
    assert found.activations <= memory_of(SMALL, Layout(**sizes, micro_batch=micro)).activations * (
        1 + pipeline / SMALL.layers
    )
    one = memory_of(SMALL, Layout(**sizes, stage=stage, recompute=recompute))
    assert found.activations >= one.activations


def test_states_of_each_stage_are_those_of_the_paper() -> None:
    """Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1: 7.5 B parameters on 64 ranks: 120, 31.4, 16.6, 1.9 GB."""
    model = Transformer(hidden=4096, heads=32, layers=37, seq=1, vocab=8, bias="none")
    scale = 7.5e9 / model.parameters
    for stage, published in enumerate((120, 31.4, 16.6, 1.9)):
        found = memory_of(model, Layout(global_batch=64, data=64, stage=stage)).model_states
        assert found * scale / 1e9 == pytest.approx(published, abs=0.05)


def test_the_nearest_that_fits_changes_the_least() -> None:
    large = Transformer(hidden=8192, heads=64, layers=80, seq=4096, vocab=32_000, attention="flash")
    wanted = Layout(global_batch=64, data=64)
    assert not forecast_layout(large, wanted, A100).fits
    known = layouts(large, A100, ranks=64, global_batch=64)
    first, *others = nearest(wanted, known, 10)
    assert first.fits
    assert all(len(first.differs(wanted)) <= len(other.differs(wanted)) for other in others)
    assert "stage=3" in first.differs(wanted)
    with pytest.raises(ValueError, match="a batch of 1 cannot be spread over 7 ranks"):
        layouts(SMALL, A100, ranks=7, global_batch=1)


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2},
    "mistral": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "head_dim": 32,
                "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2,
              "tie_word_embeddings": True},
    "phi3": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "pad_token_id": 0},
    "llama, biases": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "attention_bias": True,
                      "num_key_value_heads": 2, "mlp_bias": True, "head_dim": 32},
    "granite": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "mlp_bias": True},
    "smollm3": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "attention_bias": True,
                "pad_token_id": 0},
    "mistral, biases": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "attention_bias": True,
                        "num_key_value_heads": 2},
    "gemma": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2,
              "attention_bias": True},
    "helium": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "attention_bias": True,
               "head_dim": 16, "mlp_bias": True, "num_key_value_heads": 2},
    "olmo": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4},
    "olmo, biases": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "attention_bias": True},
    "qwen3": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3, biases": {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "attention_bias": True,
                        "num_key_value_heads": 2},
    "gpt_neox, no biases": {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4,
                            "attention_bias": False},
    "opt, no biases": {"hidden_size": 64, "ffn_dim": 200, "num_attention_heads": 4, "word_embed_proj_dim": 64,
                       "max_position_embeddings": 100, "enable_bias": False, "do_layer_norm_before": False},
    "opt, plain norms": {"hidden_size": 64, "ffn_dim": 200, "num_attention_heads": 4, "word_embed_proj_dim": 64,
                         "max_position_embeddings": 100, "layer_norm_elementwise_affine": False},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_positions": 100},
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4},
    "opt": {"hidden_size": 64, "ffn_dim": 200, "num_attention_heads": 4, "word_embed_proj_dim": 64,
            "max_position_embeddings": 100},
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_are_exactly_those_of_the_model(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    layers = {"n_layer" if kind == "gpt2" else "num_hidden_layers": 3, "vocab_size": 211}
    config = transformers.AutoConfig.for_model(kind.partition(",")[0], **CONFIGS[kind], **layers)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    found = read_transformer(tmp_path, seq=32)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert read_transformer(tmp_path / "config.json", seq=32) == found


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "t5"}, "a model of type 't5' has no reader here; there is one for llama"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts=8: experts have no formula"),
        ({"model_type": "gpt2", "n_embd": "64"}, "n_embd='64'; a whole number is needed"),
        ({"model_type": "gpt2", "n_embd": 10**400}, "n_embd=10000+; a whole number is needed, from 1 to 281"),
        (
            {"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512},
            "word_embed_proj_dim=512 and hidden_size=1024: embeddings of another width have no formula",
        ),
        ({"model_type": "llama", "num_attention_heads": True}, "num_attention_heads=True"),
    ],
)
def test_configurations_that_cannot_be_read(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        transformer_of(config, seq=8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said):
        read_transformer(tmp_path, seq=8)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds list"):
        read_transformer(tmp_path, seq=8)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        read_transformer(tmp_path, seq=8)
    with pytest.raises(ValueError, match="is no config\\.json, and no folder that has one"):
        read_transformer(tmp_path / "other", seq=8)


def _lived(interval: float, between: float, checkpoint: float, restart: float) -> float:
    """A job that fails at random: the part of its time that is progress."""
    random.seed(1)
    now = progress = saved = 0.0
    fails = random.expovariate(1 / between)
    while now < 3000 * between:
        end = now + interval + checkpoint
        if end < fails:
            now, saved = end, saved + interval
            progress = saved
        else:
            now = fails + restart
            fails = now + random.expovariate(1 / between)
    return progress / now


def test_goodput_is_what_a_job_that_fails_has() -> None:
    between, checkpoint, restart = 36_000.0, 60.0, 300.0
    found = goodput(ranks=100, hours_between_failures=1000, checkpoint_s=checkpoint, restart_s=restart)
    assert found.failures_per_day == pytest.approx(2.4)
    assert found.interval_s == pytest.approx(math.sqrt(2 * checkpoint * between) - checkpoint)
    assert found.part == pytest.approx(_lived(found.interval_s, between, checkpoint, restart), abs=0.01)
    for factor in (0.3, 3):  # no other interval has more
        assert _lived(factor * found.interval_s, between, checkpoint, restart) < found.part
    assert goodput(ranks=1, hours_between_failures=10, checkpoint_s=0, restart_s=0).part == 1.0
    assert goodput(ranks=10**6, hours_between_failures=1, checkpoint_s=60, restart_s=60).part == 0.0
    with pytest.raises(ValueError, match="restart_s=-1"):
        goodput(ranks=1, hours_between_failures=1, checkpoint_s=0, restart_s=-1)
    for ranks, hours in ((0, 1.0), (1, math.inf), (1, math.nan), (1, 1e308)):
        with pytest.raises(ValueError, match="both are above 0"):
            goodput(ranks=ranks, hours_between_failures=hours, checkpoint_s=0, restart_s=0)


def test_a_thousand_million_ranks_are_judged_at_once() -> None:
    began = time.process_time()
    found = layouts(SMALL, A100, ranks=10**9, global_batch=10**9)
    assert found
    assert all(f.layout.ranks == 10**9 for f in found)
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(("micro_batches", "layers"), [(1, 6.0), (2, 12.0), (4, 24.0), (8, 33.0)])
def test_chunks_keep_no_more_than_the_micro_batches_that_there_are(micro_batches: int, layers: float) -> None:
    """Of 24 layers in 4 stages of 2 chunks; with enough micro-batches 24 · (1 + 3 / 8)."""
    chunked = Layout(global_batch=micro_batches, pipeline=4, chunks=2)
    kept = memory_of(SMALL, Layout(global_batch=1)).activations / 24
    assert memory_of(SMALL, chunked).activations == pytest.approx(layers * kept)


def test_a_configuration_without_an_end_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        read_transformer(tmp_path, seq=128)


@pytest.mark.parametrize("tied", [True, False])
def test_the_last_stage_holds_its_logits_and_a_head(tied: bool) -> None:
    """Of 8 layers in 4 stages. Of one micro-batch the first stage keeps no more than the last one."""
    model = Transformer(hidden=256, heads=4, layers=8, seq=1024, vocab=100_000, positions=1024, tied=tied)
    one = memory_of(model, Layout(global_batch=1))
    found = memory_of(model, Layout(global_batch=1, pipeline=4))
    here = 2 * model.layer_parameters + 100_000 * 256
    assert found.head == 6 * 1024 * 100_000 == one.head
    assert (found.parameters, found.gradients, found.states) == (2 * here, 2 * here, 12 * here)
    assert found.activations == one.activations / 4
    many = memory_of(dataclasses.replace(model, vocab=64), Layout(global_batch=8, pipeline=4))
    assert many.head == 0  # here the first stage holds more: 4 micro-batches and the positions
    assert many.activations == one.activations
    chunks = memory_of(model, Layout(global_batch=8, pipeline=4, chunks=2))
    assert chunks.activations == one.activations * (1 - 3 / 8)
