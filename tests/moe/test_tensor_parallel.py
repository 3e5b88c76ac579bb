"""Experts of models of transformers that ranks share, beside ranks that share layers: what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from tests.tensor.hub import model_of

import zoo.engine
from zoo import sim

IDS = torch.randint(53, (4, 6), generator=torch.Generator().manual_seed(1))


def trained(family: str, ranks: int, **document: Any) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """By rank: losses of three steps, and the whole parameters after them."""

    def fn(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        given = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **document}
        engine = zoo.engine.initialize(given, model_of(family).float().train())[0]
        losses = []
        for _ in range(3):
            ids = IDS.chunk(engine.batch_ranks)[engine.batch_rank]
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
            losses.append(float(engine.record.loss))
        found = losses, engine.optimizer.consolidated_parameters()
        engine.destroy()
        return found

    return sim.run(ranks, fn, seed=0)


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "degree", "experts", "data", "stage"),
    [("mixtral", 2, 2, 1, 3), ("qwen3_moe", 2, 1, 2, 0), ("deepseek_v3", 2, 2, 1, 1), ("qwen2_moe", 3, 2, 1, 2)],
)
def test_tensor_expert_and_data_ranks_train_what_one_process_does(
    family: str, degree: int, experts: int, data: int, stage: int
) -> None:  # fmt: skip
    ((losses, whole),) = trained(family, 1)
    document = {
        "tensor_parallel": {"autotp_size": degree}, "moe": {"enabled": True, "ep_size": experts},
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    for own, parameters in trained(family, degree * experts * data, **document):
        assert own == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(parameters, whole, rtol=1e-4, atol=1e-5)
