"""With invariant=True what a token gets depends, bit for bit, on the tokens that it sees alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.inject.models import SIZES, model_of, prompts
from tests.inject.test_inject import counted, ran_injected
from tests.profiles import examples

pytest.importorskip("transformers")
from transformers import DynamicCache, StaticCache

from zoo.inject import inject

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODELS: dict[Any, Any] = {}


def injected(family: str, dtype: torch.dtype) -> Any:
    if (family, dtype) not in MODELS:
        MODELS[family, dtype] = model_of(family, dtype)
        inject(MODELS[family, dtype], invariant=True)
    return MODELS[family, dtype]


@torch.no_grad()
def scored(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a row of tokens, at once."""
    found: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma", "Phi3"])
def test_scoring_and_generating_give_the_same_bits(family: str, dtype: torch.dtype) -> None:
    model = injected(family, dtype)
    given_ = prompts("left")
    out = model.generate(**given_, max_new_tokens=9, do_sample=False, output_logits=True, return_dict_in_generate=True)
    for row in range(3):
        own = given_["attention_mask"][row].bool()
        ids = torch.cat([given_["input_ids"][row][own], out.sequences[row, 7:]])
        right = scored(model, ids)[int(own.sum()) - 1 : -1]
        made = torch.stack([step[row] for step in out.logits])
        ended = (out.sequences[row, 7:] == 2).nonzero()  # after the end of a row there is padding
        count = int(ended[0]) + 1 if len(ended) else len(made)
        assert count > 1
        assert torch.equal(made[:count], right[:count].to(made.dtype))


@examples(times=2)
@given(
    dtype=st.sampled_from(DTYPES), family=st.sampled_from(["Llama", "Qwen3"]), cuts=st.sets(st.integers(1, 23)),
    batch=st.integers(1, 3), pads=st.lists(st.integers(0, 5), min_size=3, max_size=3), static=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_neither_cuts_nor_batches_nor_padding_change_a_token(
    dtype: torch.dtype, family: str, cuts: set[int], batch: int, pads: list[int], static: bool, seed: int
) -> None:
    model, length = injected(family, dtype), 24
    rows = torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
    expected = [scored(model, row) for row in rows]
    most = max(pads[:batch])
    ids = torch.zeros(batch, most + length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, pad in enumerate(pads[:batch]):
        before = most - pad  # so many on the left, the others on the right
        ids[row, before : before + length], mask[row, before : before + length] = rows[row], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = StaticCache(config=model.config, max_cache_len=40) if static else DynamicCache()
    ends = [*sorted(cuts), most + length]
    found = []
    with torch.no_grad():
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            here = slice(begin, end)
            made = model(
                input_ids=ids[:, here], attention_mask=mask[:, :end], position_ids=positions[:, here], cache=cache,
                use_cache=True,
            )  # fmt: skip
            found.append(made.logits)
    logits = torch.cat(found, 1)
    for row, right in enumerate(expected):
        assert torch.equal(logits[row, mask[row].bool()], right)


def test_it_is_the_injected_forward_that_ran() -> None:
    model = model_of("Llama")
    inject(model, invariant=True)
    calls = counted(model)
    assert ran_injected(model, calls, lambda: scored(model, prompts()["input_ids"][0]))
    assert ran_injected(model, calls, lambda: model.generate(**prompts("left"), max_new_tokens=3, do_sample=False))


def test_without_it_bits_depend_on_how_much_came_at_once() -> None:
    """Or the tests above would show nothing."""
    model = model_of("Llama", num_hidden_layers=2, hidden_size=64, intermediate_size=96, head_dim=16)
    ids = torch.randint(3, SIZES["vocab_size"], (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert not torch.equal(scored(model, ids)[:3], scored(model, ids[:3]))
    inject(model, invariant=True)
    assert torch.equal(scored(model, ids)[:3], scored(model, ids[:3]))


def test_weights_that_lie_otherwise_give_the_same_bits() -> None:
    model, ids = model_of("Qwen2"), prompts()["input_ids"][0]
    inject(model, invariant=True)
    calls, expected = counted(model), scored(model, ids)
    for matrix in (model.lm_head, model.model.layers[0].mlp.down_proj, model.model.layers[1].self_attn.q_proj):
        matrix.weight = torch.nn.Parameter(matrix.weight.detach().t().contiguous().t())
    assert torch.equal(scored(model, ids), expected)
    assert ran_injected(model, calls, lambda: scored(model, ids))


def test_what_cannot_be_invariant_is_refused() -> None:
    model = model_of("SmolLM3", no_rope_layers=[1, 0])
    with pytest.raises(ValueError, match=r"not every layer of SmolLM3ForCausalLM can be injected.*needs all of them"):
        inject(model, invariant=True)
    model = model_of("Llama", attn_implementation="eager")
    with pytest.raises(ValueError, match="attn_implementation is 'eager'; allowed: sdpa"):
        inject(model, invariant=True)
    inject(model)
