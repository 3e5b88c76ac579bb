"""The loss over parts of the logits is torch's, and so are its gradients; what comes back in parts says so."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.tensor.models import Decoder, Shape, plan_of
from torch import nn
from torch.nn import functional as F

from zoo import sim
from zoo.comm import Communicator
from zoo.tensor import Count, Plan, Rule, cross_entropy, in_parts, split
from zoo.tensor.shares import deal


@given(
    vocab=st.integers(1, 12), degree=st.integers(1, 4), ignored=st.integers(0, 6), large=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)  # fmt: skip
@example(vocab=5, degree=3, ignored=6, large=False, reduction="mean")
def test_it_is_torchs(vocab: int, degree: int, ignored: int, large: bool, reduction: str) -> None:
    degree = min(degree, vocab)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, dtype=torch.float64, generator=generator) * (1e4 if large else 1.0)
    labels = torch.randint(vocab, (6,), generator=generator)
    labels[:ignored] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, labels, reduction=reduction)
    expected.sum().backward()

    def fn(rank: int) -> None:
        comm = Communicator()
        start, stop = deal(vocab, degree, rank)
        mine = logits[:, start:stop].clone().requires_grad_()
        found = cross_entropy(mine, labels, start, comm, reduction=reduction)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        found.sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(mine.grad, whole.grad[:, start:stop], rtol=1e-12, atol=1e-12, equal_nan=True)

    sim.run(degree, fn, seed=0)
    assert reduction != "mean" or math.isnan(float(expected.detach())) == (ignored == 6)


def test_gradients_of_its_gradients_are_told() -> None:
    def fn(rank: int) -> None:
        mine = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
        loss = cross_entropy(mine * 2, torch.arange(6), 4 * rank, Communicator())
        with pytest.raises(NotImplementedError, match=r"create_graph=True\) of a loss in parts"):
            torch.autograd.grad(loss, mine, create_graph=True)
        (grad,) = torch.autograd.grad(loss, mine)
        assert bool(grad.any())

    sim.run(2, fn, seed=0)


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=11, tie_word_embeddings=True, max_position_embeddings=16,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)


def plan_of_llama() -> Plan:
    at, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    return Plan(
        "llama",
        (("head", 4), ("kv", 2)),
        (
            Rule(module="model.embed_tokens", rows="vocab", cut="vocab"),
            Rule(module=f"{at}.q_proj", rows="head dim", cut="head"),
            *(Rule(module=f"{at}.{name}_proj", rows="kv dim", cut="kv") for name in "kv"),
            Rule(module=f"{at}.o_proj", columns="head dim", cut="head"),
            *(Rule(module=f"{mlp}.{name}_proj", rows="inner", cut="inner") for name in ("gate", "up")),
            Rule(module=f"{mlp}.down_proj", columns="inner", cut="inner"),
            Rule(module="lm_head", rows="vocab", cut="vocab", gather=True),
        ),
        (Count(module=at, attribute="num_key_value_groups", dims="query"),),
    )


def test_a_model_of_transformers_computes_its_loss_in_parts() -> None:
    whole, ids = llama(), torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(1))
    expected = whole(ids, labels=ids)
    expected.loss.backward()

    def fn(rank: int) -> None:
        model = llama()
        region = split(model, plan_of_llama(), Communicator())
        in_parts(model)
        log = region.comm.log
        for trained in (model, copy.deepcopy(model)):
            log.reset()
            found = trained(ids, labels=ids, num_items_in_batch=None)
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
            assert "all_gather" not in log.ops
            assert (region.inside, region._entered) == (False, [])  # nothing of this forward is kept
            numbers = 4 * ids.numel() * 4
            assert log.ops["all_reduce"].message_bytes == (3 * ids.numel() + 1) * 16 * 4 + numbers
            assert found.logits.shape == expected.logits.shape
            with pytest.raises(AttributeError, match=r"'argmax' of logits that are in parts.*logits\.gather\(\)"):
                found.logits.argmax(-1)
            torch.testing.assert_close(found.logits.gather(), expected.logits, rtol=1e-4, atol=1e-5)
            found.loss.backward()
            start, stop = deal(11, 2, rank)
            grad = whole.model.embed_tokens.weight.grad[start:stop]
            torch.testing.assert_close(trained.model.embed_tokens.weight.grad, grad, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(model(ids, labels=ids).logits, expected.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(ids).logits, expected.logits, rtol=1e-4, atol=1e-5)
        with pytest.raises(IndexError, match="vocabulary"):
            model(ids + 100, labels=ids)
        assert model(ids).logits.shape == expected.logits.shape  # nothing was left by what failed
        summed = model(ids, labels=ids, num_items_in_batch=torch.tensor(5)).loss
        torch.testing.assert_close(summed, expected.loss * 12 / 5, rtol=1e-5, atol=1e-6)

    sim.run(2, fn, seed=0)


def test_other_losses_and_heads_are_told() -> None:
    def fn(rank: int) -> None:
        shape = Shape()
        model = Decoder(shape)
        with pytest.raises(ValueError, match="not split"):
            in_parts(model, "head")
        split(model, plan_of(shape), Communicator())
        with pytest.raises(ValueError, match="has the loss None"):
            in_parts(model, "head")
        twice = llama()
        split(twice, plan_of_llama(), Communicator())
        in_parts(twice)
        with pytest.raises(ValueError, match="LlamaForCausalLM computes its loss in parts already"):
            in_parts(twice)
        comm = Communicator()
        with pytest.raises(ValueError, match="allowed are 'mean'"):
            cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), 0, comm, reduction="max")
        with pytest.raises(ValueError, match=r"they are \(N, V_r\) and \(N,\)"):
            cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long), 0, comm)
        assert isinstance(model.head, nn.Linear)

    sim.run(2, fn, seed=0)


THREE = st.lists(st.integers(-1, 8), min_size=3, max_size=3)


@given(
    labels=THREE, others=THREE,
    degree=st.integers(2, 4), ignored=st.sampled_from([-100, -1]),
)  # fmt: skip
@example(labels=[1, 99, 2], others=[1, 99, 2], degree=2, ignored=-100)
@example(labels=[1, -1, 2], others=[1, -1, 2], degree=2, ignored=-100)
@example(labels=[-1, 1, 2], others=[1, 1, 2], degree=3, ignored=-1)
def test_labels_that_are_no_words_are_told_and_other_ones_where_they_can_be(
    labels: list[int], others: list[int], degree: int, ignored: int
) -> None:  # fmt: skip
    """All ranks raise, or none: what they compare is a sum."""
    vocab = 7
    logits = torch.randn(3, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def fn(rank: int) -> str:
        start, stop = deal(vocab, degree, rank)
        mine = torch.tensor(labels if rank else others)
        try:
            cross_entropy(logits[:, start:stop].clone(), mine, start, Communicator(), ignore_index=ignored)
        except IndexError as error:
            return str(error)
        return ""

    told = sim.run(degree, fn, seed=0)
    assert len(set(told)) == 1
    bad = any(not 0 <= label < vocab and label != ignored for label in labels)
    if labels == others:
        assert bool(told[0]) == bad
    if any((a == ignored) != (b == ignored) for a, b in zip(labels, others, strict=True)):
        assert told[0]
