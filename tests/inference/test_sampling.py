"""A token is a draw from what the logits say, and a function of its place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.inference.test_generation import some_prompts
from tests.inject.models import model_of
from tests.profiles import examples

pytest.importorskip("transformers")

from zoo.inference import Sampling, generate
from zoo.kernels.philox import words


def drawn(sampling: Sampling, logits: torch.Tensor, count: int) -> torch.Tensor:
    """How often each token comes at ``count`` places, as shares."""
    places = torch.arange(count)
    found = sampling.pick(logits.expand(count, -1), places % 7, places // 7)
    return torch.bincount(found, minlength=len(logits)) / count


@pytest.mark.dear
@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 0.5}, {"top_k": 4, "top_p": 0.8},
        *(pytest.param(alone, marks=pytest.mark.slow) for alone in ({"top_k": 3}, {"top_p": 0.7})),
    ],
    ids=str,
)  # fmt: skip
def test_shares_are_probabilities(options: dict[str, Any]) -> None:
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.0, -3.0, 1.5])
    sampling = Sampling(**options)
    z = logits.double() / sampling.temperature
    if sampling.top_k:
        z[z < z.sort(descending=True).values[sampling.top_k - 1]] = -math.inf
    p = z.softmax(0)
    ordered = p.sort(descending=True)
    kept = ordered.indices[: int((ordered.values.cumsum(0) < sampling.top_p).sum()) + 1]
    right = torch.zeros_like(p)
    right[kept] = p[kept] / p[kept].sum()
    count = 7000
    found = drawn(sampling, logits, count).double()
    assert bool((found[right == 0] == 0).all())
    assert bool(((found - right).abs() <= 5 * (right * (1 - right) / count).sqrt()).all())


@examples(times=2)
@given(
    batch=st.integers(1, 5), vocabulary=st.integers(1, 40), top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]), temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    seed=st.integers(0, 2**62), spread=st.sampled_from([0.1, 3.0, 60.0]),
)  # fmt: skip
def test_neither_batch_nor_order_counts(
    batch: int, vocabulary: int, top_k: int, top_p: float, temperature: float, seed: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, vocabulary, generator=generator) * spread
    sequences, positions = (torch.randint(2**31, (batch,), generator=generator) for _ in range(2))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    found = sampling.pick(logits, sequences, positions)
    order = torch.randperm(batch, generator=generator)
    assert torch.equal(sampling.pick(logits[order], sequences[order], positions[order]), found[order])
    for row in range(batch):
        one = slice(row, row + 1)
        assert torch.equal(sampling.pick(logits[one], sequences[one], positions[one]), found[one])
    # What is left out is left out exactly: the noise of all tokens says the same.
    if temperature and not top_k and top_p == 1:
        tokens = torch.arange(vocabulary)
        for row in range(batch):
            noise = sampling.noise(int(sequences[row]), int(positions[row]), tokens)
            assert int((logits[row].double() / temperature + noise).argmax()) == int(found[row])


def test_the_noise_of_a_token_is_a_word_of_its_place() -> None:
    sampling = Sampling(seed=12345678901234)
    tokens = torch.tensor([0, 1, 5, 38, 39])
    word = words(sampling.seed, 3 << 32 | 17, 40)[tokens].double()
    right = -(-((word + 0.5) / 2**32).log()).log()
    assert torch.equal(sampling.noise(3, 17, tokens), right)
    assert not torch.equal(sampling.noise(3, 18, tokens), right)
    assert not torch.equal(sampling.noise(4, 17, tokens), right)


def test_what_cannot_be_is_told() -> None:
    for name, wrong in [
        ("temperature", -1.0), ("temperature", math.inf), ("temperature", "1"), ("temperature", math.nan),
        ("top_k", -1), ("top_k", 2.5), ("top_p", 0.0), ("top_p", 1.5), ("top_p", None), ("seed", -1), ("seed", 2**63),
        ("seed", True),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}="):
            Sampling(**{name: wrong})  # type: ignore[arg-type]
    one = torch.zeros(1, dtype=torch.int64)
    for names in (5, ["a"], [0.5], [-4]):
        with pytest.raises(ValueError, match=r"sequences.* must be .*whole number"):
            Sampling().processor(names)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"it must be \(B, V\), and B of each"):
        Sampling().pick(torch.zeros(2, 3), one, one)


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5}])
def test_rows_without_probabilities_and_places_out_of_range_are_told(options: dict[str, Any]) -> None:
    one, sampling = torch.zeros(2, dtype=torch.int64), Sampling(**options)
    for wrong in (math.nan, math.inf):
        logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, wrong, 2.0]])
        with pytest.raises(ValueError, match=f"the greatest logit of row 1 is {wrong}: there are no probabilities"):
            sampling.pick(logits, one, one)
    with pytest.raises(ValueError, match="the greatest logit of row 0 is -inf"):
        sampling.pick(torch.full((2, 3), -math.inf), one, one)
    for places in ((one - 1, one), (one + 2**31, one), (one, one - 1), (one, one + 2**31)):
        with pytest.raises(ValueError, match=r"must be a whole number from 0 to 2\^31 - 1"):
            sampling.pick(torch.zeros(2, 3), *places)
    # A low temperature is the most likely token.
    logits = torch.tensor([[-5.0, -math.inf, -3.0, -4.0], [0.0, 1.0, 3.0, 2.0]])
    for temperature in (1e-30, 1e-300, 1e-310, 5e-324):
        picked = Sampling(temperature=temperature, **options).pick(logits, one, one)
        assert picked.tolist() == [2, 2]


def test_generate_of_transformers_draws_the_same_tokens() -> None:
    model = model_of("Llama", torch.float64)
    prompts = some_prompts([4, 4, 4])
    sampling = Sampling(temperature=1.3, top_k=30, seed=5)
    right = generate(model, prompts, max_new_tokens=7, sampling=sampling, end=[])
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        processor = sampling.processor()
        found = model.generate(
            torch.stack(prompts), max_new_tokens=7, min_new_tokens=7, logits_processor=[processor], eos_token_id=None,
            **options,
        )  # fmt: skip
        assert torch.equal(found[:, 4:], torch.stack(right))
        with pytest.raises(ValueError, match="it is for one call of generate, without beams"):
            model.generate(prompts[0][None, :2], max_new_tokens=2, logits_processor=[processor])
    own = sampling.processor([2])
    found = model.generate(prompts[2][None], max_new_tokens=7, logits_processor=[own], eos_token_id=None)
    assert torch.equal(found[0, 4:], right[2])
    with pytest.raises(ValueError, match="a processor for 1 sequences"):
        model.generate(torch.stack(prompts), max_new_tokens=2, logits_processor=[sampling.processor([1])])
