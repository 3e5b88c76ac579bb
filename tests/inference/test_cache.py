"""A cache whose memory is there from the start gives what a growing one gives, in the bytes that were told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.inject.models import model_of, prompts
from tests.profiles import examples

pytest.importorskip("transformers")
from transformers import DynamicCache, LlamaConfig, MistralConfig

from zoo.inference import Cache, forecast
from zoo.inject import inject

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": 4}, "Qwen3": {},
    "Gemma2": {"sliding_window": 4, "attn_implementation": "eager"}, "Ministral": {"sliding_window": 4},
    "GPTNeoX": {}, "Phi3": {},
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_takes_it(family: str, injected: bool) -> None:
    model = model_of(family, **FAMILIES[family])
    if injected and family not in ("Gemma2", "GPTNeoX"):
        inject(model)
    for side in (None, "left"):
        for beams in (1, 3):
            options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
            cache = Cache(model.config, 7 + 12)
            found = model.generate(**prompts(side), cache=cache, **options)
            assert torch.equal(found, model.generate(**prompts(side), **options))
            assert cache.num_bytes == forecast(model, rows=3 * beams, room=7 + 12)


@examples(times=3)
@given(
    window=st.sampled_from([None, 2, 3, 5, 8]), room=st.integers(1, 24),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=9), again=st.booleans(),
)  # fmt: skip
def test_it_has_what_a_growing_cache_has(window: int | None, room: int, cuts: list[int], again: bool) -> None:
    config = (
        LlamaConfig(num_hidden_layers=1)
        if window is None
        else MistralConfig(num_hidden_layers=1, sliding_window=window)
    )
    cache = Cache(config, room)
    for turn in range(2 if again else 1):
        right = DynamicCache(config=config)
        cache.reset()
        generator = torch.Generator().manual_seed(turn)
        length = 0
        for new in cuts:
            k, v = (torch.randn(2, 3, new, 4, generator=generator) for _ in range(2))
            if length + new > room:
                with pytest.raises(
                    ValueError, match=f"room for {room} tokens a row; {length} are in it and {new} come"
                ):
                    cache.update(k, v, 0)
                break
            assert cache.get_mask_sizes(new, 0) == right.get_mask_sizes(new, 0)
            for one, other in zip(cache.update(k, v, 0), right.update(k, v, 0), strict=True):
                assert torch.equal(one, other)
            length += new
            assert cache.get_seq_length() == length


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("injected", [False, True])
def test_a_prompt_in_pieces_is_the_prompt(family: str, injected: bool) -> None:
    model = model_of(family, torch.float64 if not injected else torch.float32, **FAMILIES[family])
    if injected:
        inject(model)
    ids = torch.randint(3, 97, (2, 15), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for cuts in ([15], [1] * 15, [3, 5, 7], [9, 1, 1, 4], [2, 12, 1]):
            cache, found = Cache(model.config, 15), []
            for piece in ids.split(cuts, 1):
                found.append(model(piece, cache=cache, use_cache=True).logits)
            torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beams", [1, 2])
def test_cross_attention_reads_what_came(beams: int) -> None:
    """Models read keys and values of a layer there, and the rest of its memory is no token."""
    import transformers

    sizes = {
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    }
    config = transformers.BartConfig(vocab_size=97, d_model=32, **sizes)
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    ids = torch.randint(3, 97, (2, 6))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    cache = transformers.EncoderDecoderCache(Cache(config, 20), Cache(config, 20))
    assert torch.equal(model.generate(ids, cache=cache, **options), model.generate(ids, **options))


@pytest.mark.parametrize("window", [None, 3])
def test_keys_of_a_layer_are_those_of_a_growing_cache(window: int | None) -> None:
    config = MistralConfig(num_hidden_layers=1, sliding_window=window)
    mine, right = Cache(config, 20), DynamicCache(config=config)
    assert mine.layers[0].keys is None
    for new in (2, 1, 4, 1, 1):
        # Values of other heads and dims than keys, as some attentions have.
        k, v = torch.randn(2, 3, new, 4), torch.randn(2, 1, new, 5)
        mine.update(k, v, 0)
        right.update(k, v, 0)
        for name in ("keys", "values"):
            assert torch.equal(getattr(mine.layers[0], name), getattr(right.layers[0], name))


def test_tokens_can_be_taken_back() -> None:
    model = model_of("Llama")
    ids = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(0))
    cache = Cache(model.config, 12)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.crop(-3)
        found = model(ids[:, 6:], cache=cache).logits
        torch.testing.assert_close(found, model(ids, use_cache=False).logits[:, 6:], rtol=1e-4, atol=1e-5)
    for wrong in (1, -10):
        with pytest.raises(ValueError, match=f"{wrong} is not between -9 and 0"):
            cache.crop(wrong)
    sliding = Cache(MistralConfig(num_hidden_layers=1, sliding_window=3), 9)
    sliding.update(torch.ones(1, 1, 5, 2), torch.ones(1, 1, 5, 2), 0)
    with pytest.raises(ValueError, match=r"5 tokens came, and a sliding layer keeps 2.*keep_all=True"):
        sliding.crop(-1)


def test_what_cannot_be_is_told() -> None:
    model = model_of("Llama")
    for config in (model, None, {}):
        with pytest.raises(ValueError, match=rf"config is a {type(config).__name__}, .*; give .* model\.config"):
            Cache(config, 10)
    with pytest.raises(ValueError, match="config is a NoneType"):
        forecast(torch.nn.Linear(2, 2), rows=1, room=2)
    unsigned = torch.float8_e8m0fnu  # powers of two
    with pytest.raises(ValueError, match=r"dtype=torch\.float8_e8m0fnu; it must be .* that has signs"):
        Cache(model.config, 10, dtype=unsigned)
    with pytest.raises(ValueError, match="room for 10 tokens a row; 10 are in it and 1 come"):
        model.generate(**prompts(), max_new_tokens=12, do_sample=False, cache=Cache(model.config, 10))
    with pytest.raises(ValueError, match="room for 5 tokens a row; 0 are in it and 7 come"):
        model.generate(**prompts(), max_new_tokens=1, cache=Cache(model.config, 5))
    cache = Cache(model.config, 20)
    with torch.no_grad():
        model(prompts()["input_ids"], cache=cache)
        with pytest.raises(ValueError, match="the cache has 3 rows and 1 come"):
            model(prompts()["input_ids"][:1], cache=cache)
    with pytest.raises(ValueError, match="memory that is written in place has none"):
        model(prompts()["input_ids"], cache=Cache(model.config, 20))
    for room in (0, -1, 2.0, "8"):
        with pytest.raises(ValueError, match="must be a whole number of tokens"):
            Cache(model.config, room)  # type: ignore[arg-type]
    for wrong in ({"rows": -2, "room": 8}, {"rows": 2, "room": 8.5}):
        with pytest.raises(ValueError, match="must be a whole number, at least 1"):
            forecast(model, **wrong)  # type: ignore[arg-type]
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match="LlamaConfig has layers of chunked_attention"):
        Cache(config, 8)


@examples(times=2)
@given(
    window=st.sampled_from([None, 3, 5]), cuts=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float64]),
)  # fmt: skip
def test_it_keeps_another_dtype_and_gives_that_of_the_model(
    window: int | None, cuts: list[int], dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {} if window is None else {"sliding_window": window}
    config = (LlamaConfig if window is None else MistralConfig)(num_hidden_layers=1, **options)
    rounded, plain = Cache(config, 40, dtype=dtype), Cache(config, 40)
    kept: int = 0
    for turn, new in enumerate(cuts):
        k, v = (torch.randn(2, 3, new, 4, generator=torch.Generator().manual_seed(turn + i)) for i in (0, 90))
        mine = rounded.update(k, v, 0)
        # What has just come and does not fit goes to the model as it is.
        seen = plain.update(k.to(dtype).float(), v.to(dtype).float(), 0)
        for one, two in zip(mine, seen, strict=True):
            assert one.dtype is torch.float32
            torch.testing.assert_close(one, two, rtol=2**-7, atol=0)
            assert torch.equal(one[:, :, : one.shape[2] - new], two[:, :, : two.shape[2] - new])
        kept += new
    assert rounded.num_bytes * 4 == plain.num_bytes * dtype.itemsize
    assert rounded.get_seq_length() == kept


@pytest.mark.matrix
@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_generate_takes_one_of_another_dtype(family: str, injected: bool) -> None:
    model = model_of(family, **FAMILIES[family])
    if injected:
        inject(model)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    cache = Cache(model.config, 15, dtype=torch.float64, device="cpu")
    found = model.generate(**prompts("left"), cache=cache, **options)
    assert torch.equal(found, model.generate(**prompts("left"), **options))
    assert cache.num_bytes == forecast(model, rows=3, room=15, dtype=torch.float64)
    half = Cache(model.config, 15, dtype=torch.bfloat16)
    model.generate(**prompts("left"), cache=half, **options)
    assert 4 * half.num_bytes == cache.num_bytes
    with pytest.raises(ValueError, match=r"dtype=torch\.int8; it must be a floating dtype"):
        Cache(model.config, 15, dtype=torch.int8)
