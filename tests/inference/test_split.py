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
from zoo.inference import Cache, Sampling, forecast, generate
from zoo.inject import inject
from zoo.tensor import plan_of, split

UNEVEN = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
LENGTHS = [5, 1, 9, 3]


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
        {}, {"sampling": Sampling(top_k=20, seed=4), "slots": 2}, {"sampling": Sampling(top_p=0.8, temperature=1.3)}
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
