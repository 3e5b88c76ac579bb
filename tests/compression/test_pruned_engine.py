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


@pytest.mark.matrix
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


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def scores(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return out

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.scores(x) - y).square().mean()


def images() -> TensorDataset:
    x = torch.randn(32, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :1, :2, :2].expand(-1, 4, 2, 2).contiguous())


CHANNELS = {
    "channel_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 1, "method": "l1"},
        "different_groups": {
            "g": {"modules": ["first"], "related_modules": [["second", "norm"]], "params": {"dense_ratio": 0.5}}
        },
    }
}


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("given", ["model", "engine", "copy"])
def test_the_engine_may_be_there_still_when_the_model_becomes_smaller(stage: int, given: str) -> None:
    """As scripts for DeepSpeed do it: the hooks on the modules are the engine's, not the user's."""
    if given == "copy":
        stage = min(stage, 1)

    def job(rank: int) -> tuple[list[Tensor], list[int]]:
        torch.set_num_threads(1)
        found, sizes = [], []
        for model, data, compression, x in (
            (Convolutional(), images(), CHANNELS, torch.randn(2, 3, 6, 6)),
            (Small(), words(), section("topk"), torch.arange(8).reshape(2, 4)),
        ):
            config = document(stage, compression=compression)
            engine = initialize(config, model, training_data=data)[0]
            train(engine, 4)
            model.eval()
            with torch.no_grad():
                masked = model.scores(x)
                clean = copy.deepcopy(model) if given == "copy" else model
                redundancy_clean(engine if given == "engine" else clean, config)
                found += [masked, clean.scores(x)]
            if isinstance(clean, Small):
                sizes += [clean.layer.linear1.out_features, clean.layer.self_attn.num_heads]
            else:
                sizes += [clean.first.out_channels, clean.norm.num_features, clean.second.in_channels]
        return found, sizes

    for found, sizes in sim.run(2, job):
        for masked, clean in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(clean, masked, rtol=1e-5, atol=1e-5)
        assert sizes == [4, 4, 4, 8, 2]


def test_where_parameters_are_partitioned_the_engine_must_go_first() -> None:
    config = document(3, compression=CHANNELS)

    def job(rank: int) -> None:
        model = Convolutional()
        engine = initialize(config, model, training_data=images())[0]
        train(engine, 2)
        with pytest.raises(ValueError, match=r"partitioned.*engine\.destroy\(\)"):
            redundancy_clean(model, config)
        train(engine, 1)
        engine.destroy()
        assert redundancy_clean(model, config).first.out_channels == 4

    sim.run(2, job)


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
