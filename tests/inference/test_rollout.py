"""A model in shards generates as parts by heads and features: the same tokens, in the bytes that were planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.inference.test_generation import some_prompts
from tests.inject.models import model_of
from torch import nn

pytest.importorskip("transformers")

from zoo import sim
from zoo.inference import Rollout, Sampling
from zoo.layout import Box, boxes_of, logical_name, split_of
from zoo.zero import GatheredParameters, ZeroOptimizer

UNEVEN = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
SAMPLING = Sampling(top_k=30, seed=2)
COUNTS: tuple[list[int], ...] = ([3, 5, 2], [4], [], [1, 6])
"""Lengths of each rank's prompts."""


def step(model: Any, optimizer: Any, rank: int, number: int) -> None:
    ids = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(10 * number + rank))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def tokens(placement: Any, ranks: int, stage: int, family: str = "Llama", **options: Any) -> list[Any]:
    """Of each rank: tokens and log-probabilities after each of two steps, and the parameters at the end."""
    degree, threshold = options.pop("degree", None), options.pop("threshold", 0)

    def fn(rank: int) -> Any:
        model = model_of(family, torch.float64, **options).train()
        optimizer = ZeroOptimizer(model, stage=stage, lr=1e-2, param_persistence_threshold=threshold)
        rollout = Rollout(optimizer, placement=placement, degree=degree)
        found = []
        for number in range(2):
            step(model, optimizer, rank, number)
            prompts = some_prompts(COUNTS[rank], seed=rank)
            made = rollout.generate(prompts, max_new_tokens=4, sampling=SAMPLING, end=[], logprobs=True)
            found.append((made, rollout.score(prompts, made.tokens)))
        assert model.training
        with GatheredParameters(list(model.parameters())):
            return found, [p.detach().clone() for p in model.parameters()]

    return sim.run(ranks, fn)


CASES: list[tuple[int, int, dict[str, Any]]] = [
    (2, 3, {}), (3, 3, UNEVEN), (2, 3, {"tie_word_embeddings": True, "threshold": 200}), (4, 3, {"degree": 2}),
    (2, 1, {}), (2, 3, {"family": "GPTNeoX"}),
]  # fmt: skip


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_placements_give_the_same_tokens_and_training_does_not_notice(case: Any) -> None:
    ranks, stage, options = case
    right = tokens("in_place", ranks, stage, **options)
    for (found, trained), (expected, before) in zip(tokens("tensor", ranks, stage, **options), right, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(trained, before, strict=True))
        for (made, scored), (theirs, said) in zip(found, expected, strict=True):
            assert [one.tolist() for one in made.tokens] == [one.tolist() for one in theirs.tokens]
            for one, other in zip([*made.logprobs, *scored], [*theirs.logprobs, *said], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_boxes_of_the_weights_and_bytes_are_those_that_were_told(degree: int, dtype: torch.dtype) -> None:
    def fn(rank: int) -> tuple[int, int, int]:
        model = model_of("Llama", dtype)
        optimizer = ZeroOptimizer(model, stage=3, lr=1e-2, param_persistence_threshold=0)
        rollout = Rollout(optimizer, placement="tensor", degree=degree, injects=False)
        step(model.train(), optimizer, rank, 0)
        comm = optimizer.sharded.comm
        comm.log.reset()
        rollout.refresh()
        sent = comm.log.wire_bytes
        with GatheredParameters(list(model.parameters())):
            whole = {logical_name(model, name): p.detach().clone() for name, p in model.named_parameters()}
        held = 0
        for name, part in rollout.model.named_parameters():
            assert part.dtype is dtype
            full = whole[logical_name(rollout.model, name)]
            held += part.nbytes
            for laid in boxes_of(split_of(part).box or Box.whole(tuple(part.shape))):
                assert torch.equal(part.detach()[laid.here.ranges], full[laid.box.ranges])
        assert held == rollout.num_bytes
        return sent, rollout.sent_bytes, sum(p.nbytes for p in whole.values())

    for sent, told, whole in sim.run(4, fn):
        assert sent == told
        assert told <= whole * 3 // 4 * 1.05


@pytest.mark.dear
def test_auto_shares_the_model_where_ranks_have_shards(caplog: pytest.LogCaptureFixture) -> None:
    def fn(rank: int) -> list[str]:
        found = []
        for stage, options in ((2, {}), (3, {}), (3, {"budget_bytes": 100}), (3, {"degree": 1})):
            optimizer = ZeroOptimizer(model_of("Llama"), stage=stage, lr=1e-2, param_persistence_threshold=0)
            found.append(Rollout(optimizer, **options).placement)  # type: ignore[arg-type]
        plain = nn.Sequential(nn.Linear(4, 4))
        optimizer = ZeroOptimizer(plain, stage=3, lr=1e-2, param_persistence_threshold=0)
        return [*found, Rollout(optimizer).placement]

    with caplog.at_level("INFO", "zoo.inference"):
        assert sim.run(2, fn) == [["in_place", "tensor", "in_place", "in_place", "in_place"]] * 2
    assert "bytes a rank, and budget_bytes is 100" in caplog.text
    assert "there is no plan to cut it" in caplog.text


@pytest.mark.dear
def test_what_is_refused() -> None:
    def fn(rank: int) -> None:
        with pytest.raises(ValueError, match=r"it takes an engine, an optimizer of zoo\.zero"):
            Rollout(model_of("Llama"))
        optimizer = ZeroOptimizer(model_of("Llama"), stage=3, lr=1e-2, param_persistence_threshold=0)
        with pytest.raises(ValueError, match=r"placement='streamed'; allowed are 'auto', 'in_place', 'tensor'"):
            Rollout(optimizer, placement="streamed")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="degree=3 does not divide the 2 ranks"):
            Rollout(optimizer, degree=3)
        with pytest.raises(ValueError, match="the models have other parameters: only the one that generates has"):
            Rollout(optimizer, placement="tensor", make=lambda: model_of("Llama", num_hidden_layers=3))
        plain = ZeroOptimizer(nn.Sequential(nn.Linear(4, 4)), stage=3, lr=1e-2)
        with pytest.raises(ValueError, match="has no config to make another one of; give make="):
            Rollout(plain, placement="tensor")
        rollout = Rollout(optimizer)
        with pytest.raises(ValueError, match="ranks give other options"):
            rollout.generate([[3, 4]], max_new_tokens=2 + rank)
        rollout.close()
        with pytest.raises(ValueError, match="was closed"):
            rollout.generate([[3, 4]], max_new_tokens=2)

    sim.run(2, fn)


@pytest.mark.parametrize("placement", ["in_place", "tensor"])
def test_what_one_rank_refuses_all_do(placement: Any) -> None:
    def fn(rank: int) -> None:
        optimizer = ZeroOptimizer(model_of("Llama"), stage=3, lr=1e-2, param_persistence_threshold=0)
        rollout = Rollout(optimizer, placement=placement, injects=False)
        good = [[3, 4]]
        right = rollout.generate(good, max_new_tokens=2)
        wrong: tuple[tuple[Any, Any, str], ...] = (
            ([[3, 97]], None, "prompt 0 has the token 97"), (good, [1, 2], "there are 1 prompts and 2 sequences"),
            (good, [-1], "sequences has -1"), (good, "a", "sequences='a'; they must be"),
        )  # fmt: skip
        for prompts, sequences, told in wrong:
            given = {"prompts": prompts, "sequences": sequences} if rank == 0 else {"prompts": good}
            with pytest.raises(ValueError, match=rf"Rollout\.generate failed: rank 0: {told}"):
                rollout.generate(**given, max_new_tokens=2)
        with pytest.raises(ValueError, match=r"Rollout\.score failed: rank 1: there are 1 prompts and 0 answers"):
            rollout.score(good, good[rank:])
        numbers = torch.tensor([2 * rank])  # any whole numbers
        again = rollout.generate(good, sequences=numbers, max_new_tokens=2)  # type: ignore[arg-type]
        assert torch.equal(again[0], right[0])
        once = rollout.generate((one for one in good), max_new_tokens=2)  # type: ignore[arg-type]
        assert torch.equal(once[0], right[0])
        scored = rollout.score((one for one in good), (one for one in once))  # type: ignore[arg-type]
        assert torch.equal(scored[0], rollout.score(good, right)[0])
        with pytest.raises(ValueError, match="answers=None; give a list"):
            rollout.score(good, None)  # type: ignore[arg-type]

    sim.run(2, fn)
