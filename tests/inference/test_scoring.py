"""What scoring says of a token is what generating said: the same bits where kernels are invariant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.inference.test_generation import some_prompts
from tests.inject.models import model_of
from tests.profiles import examples

pytest.importorskip("transformers")

from zoo.inference import Gap, Sampling, gap, generate, score
from zoo.inject import inject
from zoo.kernels import loading

needs_kernels = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
MODELS: dict[Any, Any] = {}


def invariant(family: str) -> Any:
    if family not in MODELS:
        MODELS[family] = model_of(family)
        inject(MODELS[family], invariant=True)
    return MODELS[family]


@pytest.mark.dear
@needs_kernels
@examples(times=2)
@given(
    family=st.sampled_from(["Llama", "Qwen3", "Gemma"]), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    slots=st.integers(1, 3), temperature=st.sampled_from([0.0, 1.0, 2.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_scoring_has_the_bits_of_generating(
    family: str, lengths: list[int], slots: int, temperature: float, seed: int
) -> None:
    model, prompts = invariant(family), some_prompts(lengths, seed)
    sampling = Sampling(temperature=temperature, seed=seed, top_k=9)
    tokens, logprobs = generate(
        model, prompts, max_new_tokens=6, slots=slots, sampling=sampling, end=[7, 11], logprobs=True
    )
    plain = generate(model, prompts, max_new_tokens=6, slots=slots, sampling=sampling, end=[7, 11])
    assert all(map(torch.equal, tokens, plain))
    assert gap(logprobs, score(model, prompts, tokens)) == Gap(0.0, 0.0, sum(map(len, tokens)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_the_model(dtype: torch.dtype) -> None:
    model = model_of("Llama").to(dtype)
    prompts = some_prompts([4, 2])
    tokens, logprobs = generate(model, prompts, max_new_tokens=5, end=[], logprobs=True)
    for prompt, answer, found in zip(prompts, tokens, logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1].double()
        right = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        wide = 1e-5 if dtype is torch.float32 else 0.1
        torch.testing.assert_close(found.double(), right, rtol=0, atol=wide)
        assert (found.dtype, found.shape) == (torch.float32, answer.shape)
    assert gap(logprobs, score(model, prompts, tokens)).mean < (1e-5 if dtype is torch.float32 else 0.05)


def test_what_cannot_be_is_told() -> None:
    model = model_of("Llama")
    assert [len(one) for one in score(model, [[3], [4, 5]], [[], [6]])] == [0, 1]
    assert generate(model, [], max_new_tokens=2, logprobs=True) == ([], [])
    with pytest.raises(ValueError, match="1 prompts and 2 answers"):
        score(model, [[3]], [[4], [5]])
    with pytest.raises(ValueError, match=r"prompt 0 has shape \(0,\)"):
        score(model, [[]], [[4]])
    with pytest.raises(ValueError, match="rows have other lengths"):
        gap([torch.zeros(2)], [torch.zeros(3)])
    with pytest.raises(ValueError, match="Linear is no causal model of transformers"):
        score(torch.nn.Linear(2, 2).eval(), [[3]], [[4]])
    with pytest.raises(ValueError, match="training mode"):
        score(model.train(), [[3]], [[4]])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([4, -100], r"answer 1 has the token -100; the model has 97, from 0 on"),
        ([97], r"answer 1 has the token 97; the model has 97"),
        ([4.5], r"answer 1 is torch.float32; token ids are whole numbers"),
        ([True], r"answer 1 is torch.bool"),
        ("ab", r"answer 1 is 'ab'; it must be token ids"),
        (None, r"answer 1 is None; it must be token ids"),
        ([[4]], r"answer 1 has shape \(1, 1\); it must be 1-D\."),
    ],
)
def test_answers_that_are_no_tokens_are_told_before_anything_runs(answer: Any, words: str) -> None:
    model = model_of("Llama")
    with pytest.raises(ValueError, match=words):
        score(model, [[3], [4, 5]], [[6], answer])
    with pytest.raises(ValueError, match=words.replace("answer 1", "prompt 1").replace("1-D\\.", "1-D, with at least")):
        score(model, [[3], answer], [[6], [7]])


def test_gaps_of_nothing_and_of_impossible_tokens() -> None:
    never = torch.tensor([-torch.inf])
    assert gap([], []) == Gap(0.0, 0.0, 0)
    assert gap([never, torch.zeros(1)], [never, torch.ones(1)]) == Gap(0.5, 1.0, 2)
    assert gap([never], [torch.zeros(1)]).most == torch.inf
    with pytest.raises(ValueError, match="rows have other lengths"):
        gap([torch.zeros(2, 3)], [torch.zeros(2, 4)])
