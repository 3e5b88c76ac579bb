"""Tokens between steps of training: of the weights as they are then, at every stage, and training does not notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.inference.test_generation import some_prompts
from tests.inject.models import model_of

pytest.importorskip("transformers")

from zoo import sim
from zoo.comm import RankFailedError
from zoo.inference import Sampling, generate, score
from zoo.inject import inject
from zoo.inject.decoder import STATE
from zoo.zero import GatheredParameters, ZeroOptimizer

SAMPLING = Sampling(top_k=30, seed=2)
Found = tuple[list[list[torch.Tensor]], list[torch.Tensor], list[int]]


def trained(stage: int, generates: bool) -> list[Found]:
    """Of two ranks: tokens after each step, the parameters at the end, how often each injected layer ran."""

    def fn(rank: int) -> Found:
        model = model_of("Llama", torch.float64).train()
        optimizer = ZeroOptimizer(model, stage=stage, lr=1e-2, param_persistence_threshold=0)
        if generates:
            inject(model)
        words = []
        for step in range(3):
            ids = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if generates:
                model.eval()
                words.append(generate(model, some_prompts([3, 5]), max_new_tokens=4, sampling=SAMPLING, end=[]))
                model.train()
        runs = [m.__dict__[STATE].runs for m in model.modules() if STATE in m.__dict__ and m.__dict__[STATE].pieces]
        with GatheredParameters(list(model.parameters())):
            return words, [p.detach().clone() for p in model.parameters()], runs

    return sim.run(2, fn)


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_has_the_same_bits_and_tokens_are_of_the_newest_weights(stage: int) -> None:
    plain, rolled, whole = trained(stage, False), trained(stage, True), trained(0, True)
    for (_, right, _), (words, found, runs), (expected, _, _) in zip(plain, rolled, whole, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
        assert runs == [15, 15]  # 3 times two prompts and three steps of both
        for one, other in zip(words, expected, strict=True):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
        assert not all(torch.equal(mine, theirs) for mine, theirs in zip(words[0], words[2], strict=True))


COUNTS = ([3, 5, 2], [4], [])
"""Lengths of each rank's prompts: ranks have other numbers of forwards to do, and one has none."""


def by_rank(stage: int) -> list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]]:
    """Tokens of each of three ranks, how likely they were, and what scoring says of them."""

    def fn(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        model = model_of("Llama", torch.float64)
        ZeroOptimizer(model, stage=stage, lr=1e-2, param_persistence_threshold=0)
        prompts = some_prompts(COUNTS[rank], seed=rank)
        tokens, said = generate(
            model, prompts, max_new_tokens=3 + 4 * rank, slots=2, sampling=SAMPLING, end=[7, 11], logprobs=True
        )
        scored = score(model, prompts, [one[rank:] for one in tokens])  # some of another length, and none
        return tokens, said, scored

    return sim.run(3, fn)


def test_ranks_that_have_parts_generate_and_score_what_each_wants() -> None:
    for mine, right in zip(by_rank(3), by_rank(0), strict=True):
        assert [len(one) for one in mine] == [len(one) for one in right]
        assert all(
            torch.equal(one, other) for a, b in zip(mine, right, strict=True) for one, other in zip(a, b, strict=True)
        )


def test_what_one_rank_refuses_is_told_on_all() -> None:
    """Else the others would wait for its forwards."""

    def fn(rank: int) -> list[list[int]]:
        model = model_of("Llama")
        optimizer = ZeroOptimizer(model, stage=3, lr=1e-2, param_persistence_threshold=0)
        words = model.model.embed_tokens.weight
        with GatheredParameters([words], modifier_rank=0), torch.no_grad():
            words[7] = torch.inf
        good, found = [torch.tensor([3, 4])], []
        wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
            ([[3, 97]], {}, "prompt 0 has the token 97"), (good, {"room": 3}, "room=3, and prompt 0"),
            (good, {"sequences": [1, 2]}, "there are 1 prompts and 2 sequences"), (good, {"end": 0.5}, "end=0.5"),
            ([[3, 4], [3, 7]], {"sampling": Sampling()}, "the greatest logit of row 0 is nan"),
        )  # fmt: skip
        for prompts, options, told in wrong:
            expected, prefix = (ValueError, "") if rank == 0 else (RankFailedError, "rank 0: ValueError: ")
            with pytest.raises(expected, match=prefix + told):
                generate(model, prompts if rank == 0 else good, max_new_tokens=3, **(options if rank == 0 else {}))
            found.append(generate(model, good, max_new_tokens=3, end=[])[0].tolist())
        for answers in ([], [[97]]):
            with pytest.raises(ValueError if rank == 0 else RankFailedError):
                score(model, good, answers if rank == 0 else good)
            score(model, good, good)
        optimizer.close()
        return found

    first, second = sim.run(2, fn)
    assert first == second
    assert len(set(map(tuple, first))) == 1
