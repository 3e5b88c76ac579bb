"""A model that zoo.tensor has split draws the tokens that the whole one draws, at every degree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.inference.test_generation import some_prompts
from tests.inject.models import model_of
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from zoo import sim
from zoo.comm import Communicator
from zoo.inference import Cache, Sampling, forecast, generate
from zoo.inference.sampling import Words
from zoo.inject import inject
from zoo.tensor import plan_of, split
from zoo.tensor.layers import part_of

UNEVEN = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
LENGTHS = [5, 1, 9, 3]


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize(
    "case",
    [("Llama", 1, UNEVEN), ("Llama", 2, UNEVEN), ("Llama", 3, UNEVEN), ("Llama", 4, {}), ("Qwen3", 2, {})],
    ids=str,
)
def test_tokens_do_not_depend_on_the_degree(case: tuple[str, int, dict[str, Any]], injected: bool) -> None:
    family, degree, options = case
    ways: list[dict[str, Any]] = [
        {}, {"sampling": Sampling(top_k=20, seed=4), "slots": 2}, {"sampling": Sampling(top_p=0.8, temperature=1.3)},
        {"sampling": Sampling(seed=7, temperature=1.1), "slots": 3},
    ]  # fmt: skip
    model = model_of(family, torch.float64, **options)
    right = [generate(model, some_prompts(LENGTHS), max_new_tokens=6, **way) for way in ways]

    def fn(rank: int) -> tuple[list[list[torch.Tensor]], int, int]:
        part = model_of(family, torch.float64, **options)
        mesh = init_device_mesh("cpu", (1, degree), mesh_dim_names=("data", "tensor"))
        split(part, plan_of(part), mesh, training=False)
        if injected:
            inject(part)
        found = [generate(part, some_prompts(LENGTHS), max_new_tokens=6, **way) for way in ways]
        told, cache = forecast(part, rows=2, room=8), Cache(part.config, 8)
        with torch.no_grad():
            part(torch.ones(2, 4, dtype=torch.int64), cache=cache)
        return found, told, cache.num_bytes

    for found, told, there in sim.run(degree, fn):
        assert told == there
        for mine, theirs in zip(found, right, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("sampling", "travel"), [(Sampling(temperature=0), 16), (Sampling(seed=3), 16), (Sampling(top_k=5), 97 * 4)]
)
def test_words_travel_and_not_logits(sampling: Sampling, travel: int) -> None:
    """Bytes of a row and rank: a score and a word, where each rank can tell the best of its own words."""

    def fn(rank: int) -> int:
        model = model_of("Llama")
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        split(model, plan_of(model), mesh, training=False)
        comm = part_of(model.lm_head).region.comm  # type: ignore[union-attr]
        generate(model, some_prompts([3, 5]), max_new_tokens=1, sampling=sampling, end=[])  # of each two tokens
        comm.log.reset()
        generate(model, some_prompts([3, 5]), max_new_tokens=2, sampling=sampling, end=[])
        return comm.log.ops["all_gather"].message_bytes

    # 2 prompts, then 2 rows at a time: 4 rows. Gathered logits are padded to the larger part, 49 words.
    whole = {16: 4 * 2 * 16, 97 * 4: 4 * 2 * 49 * 4}[travel]
    assert sim.run(2, fn) == [whole, whole]


def test_a_logit_that_is_no_number_is_told_on_all_ranks() -> None:
    def fn(rank: int) -> str:
        model = model_of("Llama")
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        split(model, plan_of(model), mesh, training=False)
        if rank == 1:
            with torch.no_grad():
                model.lm_head.weight[3] = float("nan")
        with pytest.raises(ValueError, match="the greatest logit of row 0 is nan") as told:
            generate(model, some_prompts([3]), max_new_tokens=1, sampling=Sampling(seed=1))
        return str(told.value)

    first, second = sim.run(2, fn)
    assert first == second


def test_parts_and_what_looks_at_all_words_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="look at all of the vocabulary"):
        Sampling(top_k=3).pick(torch.ones(1, 4), torch.zeros(1), torch.zeros(1), Words(0, Communicator()))
