"""Optimizers that compress, by their names in a configuration, for a pipeline with experts and a tied layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.moe.test_pipeline import NUM_MICRO, Dense, ExpertBlock, batch
from torch import nn

import zoo.engine
from zoo import sim
from zoo.pipe import LayerSpec, PipelineModule, TiedLayerSpec

WAYS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 0.01, "freeze_step": 2, "eps": 1e-4},
    "OneBitLamb": {"lr": 0.01, "freeze_step": 2, "coeff_beta": 0.5, "eps": 1e-4},
    "ZeroOneAdam": {"lr": 0.01, "var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": 2, "eps": 1e-4},
    "DiLoCo": {"lr": 0.01, "sync_every": 3},
}


def back(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ module.linear.weight


def start(name: str, stages: int, ep_size: int, **changes: Any) -> Any:
    torch.manual_seed(0)
    weight = {"tied_weight_attr": "linear.weight"}
    layers = [
        TiedLayerSpec("ends", Dense, **weight), LayerSpec(ExpertBlock, 1, ep_size), LayerSpec(ExpertBlock, 2, ep_size),
        TiedLayerSpec("ends", Dense, forward_fn=back, **weight),
    ]  # fmt: skip
    model = PipelineModule(layers, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": NUM_MICRO, "gradient_clipping": 1.0,
        "optimizer": {"type": name, "params": {**WAYS[name], **changes.pop("params", {})}},
        "zero_optimization": {"stage": 0}, **changes,
    }  # fmt: skip
    return zoo.engine.initialize(config, model)[0]


def train(engine: Any, steps: range, factor: float = 1.0) -> list[float]:
    found = []
    for step in steps:
        batches = [batch(step, m, engine.batch_rank) for m in range(NUM_MICRO)]
        found.append(float(engine.train_batch(iter([(x * factor, y) for x, y in batches]))))
    return found


def values(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.optimizer.whole_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_a_pipeline_with_experts_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """With the same bits on the same mesh, between two agreements too; and on others with what the ranks have in
    common."""

    def save(rank: int) -> Any:
        engine = start(name, 2, 2)
        losses = train(engine, range(5))
        engine.save_checkpoint(tmp_path)
        saved = values(engine)
        return losses, saved, train(engine, range(5, 8)), values(engine)

    def again(rank: int, stages: int, ep_size: int) -> Any:
        engine = start(name, stages, ep_size)
        train(engine, range(50, 51))  # of which nothing stays
        engine.load_checkpoint(tmp_path)
        return values(engine), train(engine, range(5, 8)), values(engine)

    saved = sim.run(4, save)
    for (_, was, losses, after), found in zip(saved, sim.run(4, lambda r: again(r, 2, 2)), strict=True):
        assert found[1] == losses
        for mine, theirs in ((found[0], was), (found[2], after)):
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    # (stages, ep_size, ranks), of which two are data-parallel
    others = {"OneBitAdam": (1, 1, 2), "OneBitLamb": (2, 1, 4), "ZeroOneAdam": (1, 1, 2), "DiLoCo": (1, 2, 2)}
    stages, ep_size, world = others[name]
    for _, losses, later in sim.run(world, lambda r: again(r, stages, ep_size)):
        assert losses == pytest.approx(saved[0][2], rel=0.05)
        assert all(bool(value.isfinite().all()) for value in later.values())


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam"])
def test_an_overflow_on_one_rank_of_one_stage_skips_the_step_on_all(name: str) -> None:
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 100}

    def fn(rank: int, fails: bool) -> Any:
        engine = start(name, 2, 2, fp16=fp16)
        for step in range(6):
            if fails and step in (1, 4):
                train(engine, range(step, step + 1), float("inf") if engine.batch_rank == 1 else 1.0)
            train(engine, range(step, step + 1))
        return engine.skipped_steps, values(engine)

    smooth, failed = (sim.run(4, lambda r, f=f: fn(r, f)) for f in (False, True))
    assert [skipped for skipped, _ in failed] == [2] * 4
    for (_, a), (_, b) in zip(smooth, failed, strict=True):
        for key in a:  # the scale has halved twice: fp16 gradients lose bits elsewhere, and signs may turn
            torch.testing.assert_close(a[key].float(), b[key].float(), rtol=5e-2, atol=3e-2)


@pytest.mark.dear
def test_a_warm_up_ends_on_all_stages_at_once() -> None:
    def fn(rank: int) -> Any:
        engine = start("OneBitAdam", 2, 2, params={"freeze_step": "auto", "betas": [0.9, 0.5]})
        losses = train(engine, range(8))
        return engine.optimizer.param_groups[0]["freeze_step"], losses

    found = sim.run(4, fn)
    assert all(of_rank == found[0] for of_rank in found)
