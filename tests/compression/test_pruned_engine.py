"""Training with masks in an engine, and the smaller model that comes out of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.compression.models import document, start, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from zoo import sim
from zoo.compression import init_compression, redundancy_clean, transforms_of
from zoo.engine import initialize


class Small(nn.Module):
    """An encoder layer between a table and a head, trained on words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.layer = nn.TransformerEncoderLayer(8, 4, 16, batch_first=True, dropout=0.0)

    def scores(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(x)))
        return out

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x).flatten(0, 1), y.flatten())


def section(method: str) -> dict[str, Any]:
    def one(modules: str, related: list[str] | None, **shared: Any) -> dict[str, Any]:
        group = {"modules": [modules], "params": {"dense_ratio": 0.5}}
        if related is not None:
            group["related_modules"] = [related]  # type: ignore[list-item]
        return {
            "shared_parameters": {"enabled": True, "schedule_offset": 1, "method": method, **shared},
            "different_groups": {"g": group},
        }

    return {
        "row_pruning": one("linear1", ["linear2"]),
        "head_pruning": one("self_attn", [], num_heads=4),
        "sparse_pruning": one("^head$", None),
    }


def words() -> TensorDataset:
    x = torch.randint(12, (32, 4), generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x + 3) % 12)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("method", ["l1", "topk"])
def test_what_an_engine_has_trained_is_smaller_when_it_is_clean(stage: int, method: str) -> None:
    config = document(stage, compression=section(method))

    def job(rank: int) -> tuple[Tensor, Tensor, list[int], list[str]]:
        torch.set_num_threads(1)
        model = Small()
        engine = initialize(config, model, training_data=words())[0]
        losses = train(engine, 5)
        assert losses[-1] < losses[0]
        engine.destroy()
        model.eval()
        x = torch.arange(8).reshape(2, 4)
        with torch.no_grad():
            masked = model.scores(x)
            clean = redundancy_clean(model, config)
            found = clean.scores(x)
        shapes = [
            clean.layer.linear1.out_features,
            clean.layer.self_attn.num_heads,
            int((clean.head.weight != 0).sum()),
        ]
        return masked, found, shapes, list(clean.state_dict())

    for masked, found, shapes, names in sim.run(2, job):
        torch.testing.assert_close(found, masked, rtol=1e-5, atol=1e-5)
        assert shapes == [8, 2, 48]
        assert names == list(Small().state_dict()), "scores are gone, names stay"


def test_scores_are_trained_by_the_engine_and_only_from_the_offset_on() -> None:
    config = document(3, compression=section("topk"))
    config["optimizer"]["params"]["weight_decay"] = 0.0

    def job(rank: int) -> list[bool]:
        engine = initialize(config, Small(), training_data=words())[0]
        found = []
        for _ in range(3):
            before = {n: v.clone() for n, v in engine.optimizer.consolidated_parameters().items() if "_scores" in n}
            engine.train_batch()
            after = engine.optimizer.consolidated_parameters()
            assert len(before) == 3
            found.append(any(not torch.equal(value, after[name]) for name, value in before.items()))
        return found

    assert sim.run(2, job) == [[False, True, True]] * 2


def test_a_model_in_bf16_is_masked_and_cleaned_in_bf16() -> None:
    config = document(2, compression=section("l1"), bf16={"enabled": True})
    model = Small()
    engine = start(config, model)
    train(engine, 3)
    masks = {t.site.name: copy.deepcopy(t) for t in transforms_of(model)}
    assert "layer.linear1.weight" in masks
    engine.destroy()
    model.eval()
    x = torch.arange(8).reshape(2, 4)
    with torch.no_grad():
        masked = model.scores(x)
        found = redundancy_clean(model, config).scores(x)
    torch.testing.assert_close(found.float(), masked.float(), rtol=0.02, atol=0.02)


def test_init_compression_before_an_engine_is_the_same_as_the_engine_alone() -> None:
    config = document(1, compression=section("topk"))
    first = start(config, Small())
    second = start(config, init_compression(Small(), config))
    assert train(first, 3) == train(second, 3)
