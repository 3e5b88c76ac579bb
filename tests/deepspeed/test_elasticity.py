"""``deepspeed.elasticity``, and batches that ``initialize`` takes from it. Values are DeepSpeed's, written down."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.processes import run_ranks

import zoo.deepspeed
from zoo.deepspeed import elasticity

VERSION = "0.19.8"


def document(**more: Any) -> dict[str, Any]:
    section = {
        "enabled": True, "max_train_batch_size": 10_000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32,
        "max_gpus": 1500, "min_time": 20, "version": 0.1,
    }  # fmt: skip
    return {"elasticity": {key: value for key, value in {**section, **more}.items() if value is not ...}}


def compute(world_size: int = 0, return_microbatch: bool = False, release: str = VERSION, **more: Any) -> Any:
    return elasticity.compute_elastic_config(document(**more), release, world_size, return_microbatch)


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_whether_it_is_enabled() -> None:
    assert elasticity.elasticity_enabled({"elasticity": {"enabled": True}})
    assert not elasticity.elasticity_enabled({})
    assert issubclass(elasticity.ElasticityConfigError, elasticity.ElasticityError)


def test_the_batch_and_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, sizes = compute()
    assert (batch, len(sizes)) == (9792, 23)
    assert compute(64) == (9792, sizes, 17)
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert compute(return_microbatch=True) == (9792, sizes, 17)
    assert compute() == (9792, sizes)
    nodes = {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 8, "max_gpus": 256}
    given = document(**nodes, num_gpus_per_node=8, version=0.2)
    batch, sizes, micro = elasticity.compute_elastic_config(given, VERSION, 8, True)
    assert (batch, len(sizes), micro) == (1920, 13, 6)


@pytest.mark.parametrize(("mp", "micros", "micro"), [(1, [4, 8], 4), (2, [4, 8], 8), (4, [4, 8], 8), (2, [8], 8)])
def test_a_micro_batch_is_of_a_data_parallel_rank(mp: int, micros: list[int], micro: int) -> None:
    found = compute(
        16, True, version=0.2, model_parallel_size=mp, num_gpus_per_node=8, max_train_batch_size=64,
        micro_batch_sizes=micros, min_gpus=16, max_gpus=16,
    )  # fmt: skip
    assert found[2] == micro


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"world_size": 128}, elasticity.ElasticityIncompatibleWorldSize, "128 data-parallel ranks do not divide"),
        ({"return_microbatch": True}, elasticity.ElasticityConfigError, "needs the number of ranks"),
        ({"release": "0.2"}, elasticity.ElasticityError, "version 0.2 of DeepSpeed has no elasticity"),
        ({"enabled": False}, elasticity.ElasticityError, "no section elasticity that is enabled"),
        ({"max_train_batch_size": ...}, elasticity.ElasticityConfigError, "enabled without max_train_batch_size"),
        ({"micro_batch_sizes": ...}, elasticity.ElasticityConfigError, "enabled without micro_batch_sizes"),
        ({"micro_batch_sizes": 5}, elasticity.ElasticityConfigError, "micro_batch_sizes is 5; give a list"),
        ({"micro_batch_sizes": []}, elasticity.ElasticityConfigError, "the list of micro-batches is empty"),
        ({"micro_batch_sizes": [4, None]}, elasticity.ElasticityConfigError, "have None"),
        ({"micro_batch_sizes": [1, -1]}, elasticity.ElasticityConfigError, "have -1"),
        ({"min_gpus": -1}, elasticity.ElasticityConfigError, "min_gpus is -1"),
        ({"max_gpus": -1}, elasticity.ElasticityConfigError, "max_gpus is -1"),
        ({"model_parallel_size": 4}, elasticity.ElasticityConfigError, "v0.1 knows no model parallelism"),
    ],
)
def test_what_cannot_be(arguments: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        compute(**arguments)


def test_versions_of_the_section() -> None:
    given = document()
    for version, kind, said in (
        ("0.3", elasticity.ElasticityError, "give 0.1 or 0.2"),
        (0.2, elasticity.ElasticityConfigError, "v0.2 needs the number of ranks"),
    ):
        given["elasticity"]["version"] = version
        with pytest.raises(kind, match=said):
            elasticity.compute_elastic_config(given, VERSION)
    given["elasticity"] |= {"version": 0.2, "model_parallel_size": 16, "num_gpus_per_node": 8}
    with pytest.raises(elasticity.ElasticityConfigError, match="a node of 8 ranks does not hold whole groups of 16"):
        elasticity.compute_elastic_config(given, VERSION, 16)


SMALL = {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [1, 2, 3, 4], "min_gpus": 1, "max_gpus": 4}


def config(**more: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    return {"optimizer": optimizer, "elasticity": {**SMALL, "version": 0.1}, **more}


def test_a_scheduler_that_planned_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    elasticity.ensure_immutable_elastic_config(config()["elasticity"])
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps({**SMALL, "max_train_batch_size": 27, "version": 0.1}))
    with pytest.raises(elasticity.ElasticityConfigError, match="planned with max_acceptable_batch_size = 27"):
        zoo.deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config())


def test_batch_sizes_of_the_document_are_refused_or_ignored() -> None:
    with pytest.raises(elasticity.ElasticityConfigError, match="the document has train_batch_size too"):
        zoo.deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config(train_batch_size=2))
    given = config(train_batch_size=2)
    given["elasticity"]["ignore_non_elastic_batch_info"] = True
    engine, *_ = zoo.deepspeed.initialize(model=torch.nn.Linear(2, 2), config=given)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (4, 4)


def _sizes(rank: int) -> list[int]:
    engine, *_ = zoo.deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config())
    return [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()]


def test_ranks_share_the_same_batch() -> None:
    assert run_ranks(2, _sizes) == {0: [4, 2, 1], 1: [4, 2, 1]}
