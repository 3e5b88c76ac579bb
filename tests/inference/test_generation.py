"""Many prompts over few slots: what each gets depends on nothing but itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.inject.models import model_of
from tests.profiles import examples

pytest.importorskip("transformers")

from zoo.inference import Sampling, generate, score
from zoo.inject import inject
from zoo.nn import pack_linears

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": 4}, "Qwen3": {},
    "Gemma2": {"sliding_window": 4, "attn_implementation": "eager"}, "Ministral": {"sliding_window": 4},
    "GPTNeoX": {}, "OPT": {"word_embed_proj_dim": 32, "ffn_dim": 48}, "Phi3": {},
}  # fmt: skip
MODELS: dict[Any, Any] = {}


def some_prompts(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (n,), generator=generator) for n in lengths]


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    model = model_of(family, **FAMILIES[family])
    prompts = some_prompts([5, 1, 9, 3, 7])
    right = [model.generate(p[None], max_new_tokens=8, do_sample=False)[0, len(p) :] for p in prompts]
    for slots in (1, 2, 5, 9):
        found = generate(model, prompts, max_new_tokens=8, slots=slots)
        assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "GPTNeo": (
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        r"hides keys by a mask of its own \(transformer\.h\.1\.attn\.attention\.bias\)",
    ),
    "TrOCR": (
        {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
        "cannot be told the positions of tokens",
    ),
    "Bloom": ({"n_layer": 2, "n_head": 4}, "cannot be told the positions of tokens"),
    "Falcon": ({"head_dim": None, "alibi": True, "new_decoder_architecture": False}, "adds ALiBi"),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("family", ALONE)
def test_models_whose_rows_need_one_length_take_one_slot(family: str) -> None:
    options, why = ALONE[family]
    model = model_of(family, attn_implementation="eager", **options)
    prompts = some_prompts([5, 1, 9, 3, 7])
    right = [model.generate(p[None], max_new_tokens=8, do_sample=False)[0, len(p) :] for p in prompts]
    found = generate(model, prompts, max_new_tokens=8, slots=1)
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    assert torch.equal(generate(model, prompts[2:3], max_new_tokens=8)[0], right[2])
    with pytest.raises(ValueError, match=f"{why}.*give slots=1"):
        generate(model, prompts, max_new_tokens=8)


class Wrapped(torch.nn.Module):
    """As DDP and its like: what it knows of the model is what somebody has put there."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module, self.config, self.generate = model, model.config, model.generate

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_a_wrapper_generates_what_the_model_does() -> None:
    model, prompts = model_of("Llama"), some_prompts([5, 1, 9])
    right = generate(model, prompts, max_new_tokens=4)
    found = generate(Wrapped(model).eval(), prompts, max_new_tokens=4)
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    local = Wrapped(model_of("GPTNeo", attn_implementation="eager", **ALONE["GPTNeo"][0])).eval()
    with pytest.raises(ValueError, match="GPTNeoForCausalLM hides keys by a mask of its own"):
        generate(local, prompts, max_new_tokens=4)


def test_models_that_keep_nothing_or_have_an_encoder_are_told() -> None:
    import transformers

    small = {"n_embd": 32, "n_layer": 2, "n_head": 4}
    nothing = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(vocab_size=97, **small)).eval()
    with pytest.raises(ValueError, match="OpenAIGPTLMHeadModel keeps not every layer's tokens in the cache"):
        generate(nothing, some_prompts([3]), max_new_tokens=2)
    sizes = {
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 8))
    }
    config = transformers.BartConfig(vocab_size=97, d_model=16, **sizes)
    with pytest.raises(ValueError, match="BartForConditionalGeneration has an encoder"):
        generate(transformers.BartForConditionalGeneration(config).eval(), some_prompts([3]), max_new_tokens=2)


def invariant(bits: int, dtype: torch.dtype) -> Any:
    if (bits, dtype) not in MODELS:
        model = model_of("Llama", dtype, hidden_size=64, intermediate_size=96, head_dim=16)
        if bits < 16:
            pack_linears(model, bits=bits, group_size=16)
        inject(model, invariant=True)
        MODELS[bits, dtype] = model
    return MODELS[bits, dtype]


@pytest.mark.dear
@examples(times=1)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), slots=st.integers(1, 4), most=st.integers(1, 7),
    temperature=st.sampled_from([0.0, 1.0, 1.5]), top_k=st.sampled_from([0, 5]), bits=st.sampled_from([16, 8, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), end=st.sampled_from([[], [5, 40, 41, 90]]),
    seed=st.integers(0, 99), more=st.integers(0, 5),
)  # fmt: skip
def test_neither_slots_nor_order_nor_others_count(
    lengths: list[int], slots: int, most: int, temperature: float, top_k: int, bits: int, dtype: torch.dtype,
    end: list[int], seed: int, more: int,
) -> None:  # fmt: skip
    model, prompts = invariant(bits, dtype), some_prompts(lengths, seed)
    options: dict[str, Any] = {
        "max_new_tokens": most, "end": end, "sampling": Sampling(temperature=temperature, top_k=top_k, seed=seed)
    }  # fmt: skip
    alone = [generate(model, [p], sequences=[i], **options)[0] for i, p in enumerate(prompts)]
    found = generate(model, prompts, slots=slots, room=max(lengths) + most + more, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
    names = list(reversed(range(len(prompts))))
    back = generate(model, prompts[::-1], slots=slots, sequences=names, **options)
    assert all(torch.equal(one, other) for one, other in zip(back, reversed(alone), strict=True))
    for one in alone:
        ended = [i for i, token in enumerate(one.tolist()) if token in end]
        assert len(one) == (ended[0] + 1 if ended else most)


def test_equal_prompts_draw_different_tokens() -> None:
    model = invariant(16, torch.float32)
    prompt = some_prompts([4])[0]
    found = generate(model, [prompt] * 4, max_new_tokens=6, end=[], sampling=Sampling(temperature=2.0))
    assert len({tuple(one.tolist()) for one in found}) == 4
    assert generate(model, [], max_new_tokens=3) == []


def test_prompts_and_ends_of_other_kinds() -> None:
    model, prompts = invariant(16, torch.float32), some_prompts([4, 6])
    right = generate(model, prompts, max_new_tokens=5, end=[])
    last = right[0][-1]
    found = generate(model, [p.tolist() for p in prompts], max_new_tokens=5, end=[])
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    for end in (last, last[None], last.numpy()[()], [last], int(last)):
        found = generate(model, [p.int() for p in prompts], max_new_tokens=5, end=end)  # type: ignore[arg-type]
        assert all(torch.equal(one, other[: len(one)]) for one, other in zip(found, right, strict=True))
        assert found[0][-1] == last


def test_ids_as_files_of_tokens_have_them() -> None:
    model = model_of("Llama")
    right = generate(model, [[5, 96]], max_new_tokens=2, end=[])[0]
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64, np.int16):
        assert torch.equal(generate(model, [np.array([5, 96], dtype)], max_new_tokens=2, end=[])[0], right)
        with pytest.raises(ValueError, match="prompt 0 has the token 97"):
            generate(model, [np.array([5, 97], dtype)], max_new_tokens=2)


@pytest.mark.parametrize(
    ("family", "table"), [("GPTBigCode", "transformer.wpe"), ("OPT", "embed_positions"), ("GPTJ", "")]
)
def test_no_token_is_behind_the_last_position_of_a_table(family: str, table: str) -> None:
    sizes = {"GPTBigCode": {"num_key_value_heads": None}, "OPT": FAMILIES["OPT"], "GPTJ": {"rotary_dim": 4}}[family]
    model = model_of(family, max_position_embeddings=16, **sizes)
    assert len(generate(model, [[5] * 12], max_new_tokens=5, end=[], slots=1)[0]) == 5
    assert len(score(model, [[5] * 12], [[6] * 5])[0]) == 5
    with pytest.raises(
        ValueError, match=rf"prompt 1 with max_new_tokens=6 takes 17 positions, and .* has 16 .*{table}"
    ):
        generate(model, [[5], [5] * 12], max_new_tokens=6, slots=1)
    with pytest.raises(ValueError, match=r"prompt 0 with its answer takes 17 positions, and .* has 16"):
        score(model, [[5] * 12], [[6] * 6])
    longer = model_of("Llama", max_position_embeddings=4)  # computes the angles of any position
    assert len(generate(longer, [[5] * 12], max_new_tokens=6, end=[])[0]) == 6


def test_a_short_row_is_not_touched_by_what_was_in_its_slot() -> None:
    """An infinite number that a longer row left behind must not come back through a mask."""
    model = invariant(16, torch.float32)
    prompts = some_prompts([12, 2, 2])
    alone = [generate(model, [p], max_new_tokens=5, end=[])[0] for p in prompts]
    found = generate(model, prompts, max_new_tokens=5, end=[], slots=2)
    assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))


def test_what_cannot_be_is_told_before_anything_is_computed() -> None:
    model = model_of("Llama")
    prompts = some_prompts([3, 6])
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for wrong, match in [
        ({"max_new_tokens": 0}, "max_new_tokens=0; it must be a whole number"),
        ({"max_new_tokens": 2, "slots": 0}, "slots=0"),
        ({"max_new_tokens": 2, "room": 7}, "room=7, and prompt 1 has 6 tokens and gets 2 more; it must be at least 8"),
        ({"max_new_tokens": 2, "sequences": [1]}, "2 prompts and 1 sequences"),
        ({"max_new_tokens": 2, "sequences": [1, 2**31]}, "sequences has 2147483648"),
        ({"max_new_tokens": 2, "room": 9.0}, r"room=9\.0; it must be a whole number"),
        ({"max_new_tokens": 2, "sampling": 0.7}, r"sampling=0\.7; it must be a zoo\.inference\.Sampling"),
        ({"max_new_tokens": 2, "end": "</s>"}, "end='</s>'; it must be a token id, or several"),
        ({"max_new_tokens": 2, "end": [1.5]}, "it must be a token id, or several"),
    ]:
        with pytest.raises(ValueError, match=match):
            generate(model, prompts, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt 1 has shape"):
        generate(model, [prompts[0], torch.zeros(0, dtype=torch.int64)], max_new_tokens=2)
    with pytest.raises(ValueError, match="prompt 0 has shape"):
        generate(model, [prompts[0][None]], max_new_tokens=2)
    for ids, match in [
        ([5, 97], "prompt 1 has the token 97; the model has 97, from 0 on"),
        ([5, -1], "prompt 1 has the token -1; the model has 97"),
        ([5.5, 7.0], r"prompt 1 is torch\.float32; token ids are whole numbers"),
        (torch.tensor([True]), r"prompt 1 is torch\.bool; token ids are whole numbers"),
        ("words", "prompt 1 is 'words'; it must be token ids: call the tokenizer"),
    ]:
        with pytest.raises(ValueError, match=match):
            generate(model, [prompts[0], ids], max_new_tokens=2)  # type: ignore[list-item]
    for none in (None, 5):
        with pytest.raises(ValueError, match=f"prompts={none}; give a list"):
            generate(model, none, max_new_tokens=2)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match=f"answers={none}; give a list"):
            score(model, prompts, none)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        generate(model.train(), prompts, max_new_tokens=2)
    with pytest.raises(ValueError, match="no causal model of transformers"):
        generate(torch.nn.Linear(2, 2).eval(), prompts, max_new_tokens=2)
    assert not calls
    empty = model_of("Llama").to("meta")
    for call in (lambda: generate(empty, prompts, max_new_tokens=2), lambda: score(empty, prompts, prompts)):
        with pytest.raises(ValueError, match=r"parameters of LlamaForCausalLM are on the meta device, .*; load them"):
            call()
