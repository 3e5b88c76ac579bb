"""Optimizers that compress, by a configuration: checkpoints in any phase, skipped steps, other optimizers' states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.checkpointing import load
from zoo.engine import initialize

ADAM = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2, "eps": 1e-4}}
LAMB = {"type": "OneBitLamb", "params": {"lr": 1e-2, "freeze_step": 2, "coeff_beta": 0.5, "eps": 1e-4}}
ZERO_ONE = {
    "type": "ZeroOneAdam",
    "params": {"lr": 1e-2, "var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": 2, "eps": 1e-4},
}
LOCAL = {"type": "LocalSGD", "params": {"lr": 1e-2, "sync_every": 3, "momentum": 0.5}}
DILOCO = {"type": "DiLoCo", "params": {"lr": 1e-2, "sync_every": 3}}
WAYS = {"Adam": ADAM, "Lamb": LAMB, "ZeroOne": ZERO_ONE, "Local": LOCAL, "DiLoCo": DILOCO}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.to(self.layers[0].weight.dtype)).float().square().mean()


def start(world: int, optimizer: dict[str, Any], stage: int = 0, **sections: Any) -> Any:
    config = {
        "train_batch_size": 12, "optimizer": optimizer, "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 12 // world, **sections,
    }  # fmt: skip
    if "gradient_accumulation_steps" in sections:
        del config["train_micro_batch_size_per_gpu"]
    return initialize(config, Net())[0]


def step(engine: Any, rank: int, number: int, factor: float = 1.0) -> None:
    dice = torch.Generator().manual_seed(1000 * rank + number)
    engine.train_batch(iter([torch.randn(12 // engine.comm.size, 6, generator=dice) * factor]))


def values(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone().float() for name, value in engine.optimizer.whole_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.matrix
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_checkpoint_of_any_phase_goes_on(tmp_path: Path, way: dict[str, Any], steps: int) -> None:
    """With the same bits on as many ranks, and on another number from what the ranks have in common, or their mean."""

    def save(rank: int) -> Any:
        engine = start(2, way)
        for number in range(steps):
            step(engine, rank, number)
        engine.save_checkpoint(tmp_path)
        own = values(engine)
        for number in range(steps, steps + 4):
            step(engine, rank, number)
        return own, values(engine)

    def again(rank: int, world: int) -> Any:
        engine = start(world, way)
        step(engine, rank, 50)  # of which nothing stays
        engine.load_checkpoint(tmp_path)
        own = values(engine)
        for number in range(steps, steps + 4):
            step(engine, rank, number)
        return own, values(engine)

    saved = sim.run(2, save)
    for before, after in zip(saved, sim.run(2, lambda r: again(r, 2)), strict=True):
        assert same(after[0], before[0])
        assert same(after[1], before[1])
    for world in (1, 3):
        for own, later in sim.run(world, lambda r, w=world: again(r, w)):
            for name, value in own.items():
                torch.testing.assert_close(value, torch.stack([of[name] for of, _ in saved]).mean(0))
            assert all(bool(value.isfinite().all()) for value in later.values())


@pytest.mark.parametrize("stage", [0, 2])
def test_folded_errors_are_less_to_write_and_enough_to_go_on(tmp_path: Path, stage: int) -> None:
    def save(rank: int) -> None:
        for errors in ("ranks", "folded"):
            engine = start(2, ADAM, stage, checkpoint={"errors": errors})
            for number in range(4):
                step(engine, rank, number)
            engine.save_checkpoint(tmp_path / errors)
            engine.wait_for_checkpoint()

    sim.run(2, save)

    def roles(rank: int) -> Any:
        found = []
        for errors in ("ranks", "folded"):
            engine = start(3, ADAM, stage)
            engine.load_checkpoint(tmp_path / errors)
            step(engine, rank, 4)
            found.append(values(engine))
        return found

    for apiece, folded in sim.run(3, roles):
        for name in apiece:
            torch.testing.assert_close(apiece[name], folded[name])
    with load(tmp_path / "ranks") as apiece, load(tmp_path / "folded") as folded:
        assert {"feedback.0", "feedback.1"} <= set(apiece.roles["layers.0.weight"])
        assert {role for role in folded.roles["layers.0.weight"] if role.startswith(("feedback", "owed"))} == {"owed"}


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adam_and_onebit_adam_go_on_from_each_other(tmp_path: Path, stage: int) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}

    def fn(rank: int) -> Any:
        found = []
        for first, second in ((adam, ADAM), (ADAM, adam)):
            folder = tmp_path / first["type"]
            engine = start(3, first, stage)
            for number in range(4):
                step(engine, rank, number)
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
            again = start(3, second, stage)
            again.load_checkpoint(folder)
            assert same(values(again), values(engine))
            for number in range(4, 7):
                step(again, rank, number)
            found.append(values(again))
        return found

    runs = sim.run(3, fn)
    for of_rank in runs:
        assert all(same(a, b) for a, b in zip(of_rank, runs[0], strict=True))


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_skipped_steps_of_a_dynamic_loss_scale_leave_everything(way: dict[str, Any]) -> None:
    """Also in the midst of local steps, and where only one rank's gradients overflow."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 100}

    def fn(rank: int, fails: bool) -> Any:
        engine = start(2, way, fp16=fp16, gradient_clipping=1.0)
        for number in range(7):
            if fails and number in (1, 3, 5):
                step(engine, rank, 60, float("inf") if rank == 1 else 1.0)
            step(engine, rank, number)
        return values(engine), engine.skipped_steps

    smooth, failed = (sim.run(2, lambda r, f=f: fn(r, f)) for f in (False, True))
    assert [skipped for _, skipped in failed] == [3, 3]
    for (a, _), (b, _) in zip(smooth, failed, strict=True):
        for name in a:  # the scale has halved three times: fp16 gradients lose bits elsewhere
            torch.testing.assert_close(a[name], b[name], rtol=1e-2, atol=1e-2)


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (0, "bf16"), (2, "float32")])
def test_accumulation_over_the_end_of_the_warm_up(stage: int, dtype: str) -> None:
    """Micro-batches of a step are one gradient, whichever phase it belongs to; at stage 2 each is compressed."""

    def fn(rank: int, accumulation: int) -> Any:
        given = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
        engine = start(2, ADAM, stage, gradient_accumulation_steps=accumulation, **given)
        for number in range(5):
            dice = torch.Generator().manual_seed(1000 * rank + number)
            whole = torch.randn(6, 6, generator=dice)
            engine.train_batch(iter(list(whole.chunk(accumulation))))
        return values(engine)

    once, thrice = (sim.run(2, lambda r, a=a: fn(r, a)) for a in (1, 3))
    assert same(thrice[0], thrice[1])
    for name in once[0] if stage == 0 else ():
        torch.testing.assert_close(once[0][name], thrice[0][name], rtol=2e-2, atol=2e-2)
