"""Updates in backward: when they are possible, what they ask of the caller, and what they leave behind.

That they compute the same bits is a law of tests/laws/test_placements.py, for tiers of test_offload.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.optim import AdamW, Lamb
from zoo.shard import OffloadError
from zoo.zero import DryRun, ZeroOptimizer, safe_get_full_fp32_param, safe_set_full_fp32_param


def build(stage: int = 3, **options: Any) -> tuple[nn.Sequential, ZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    settings = {
        "optimizer": AdamW, "lr": 0.1, "units": [nn.Linear], "param_persistence_threshold": 0, "reduce_bucket_size": 1,
        "sub_group_size": 1, "update_in_backward": True, **options,
    }  # fmt: skip
    return model, ZeroOptimizer(model, stage=stage, **settings)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(x).square().mean()
    return loss


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_norm": 1.0}, "update_in_backward=True with clip_norm=1.0"),
        ({"loss_scale": "dynamic"}, "update_in_backward=True with loss_scale='dynamic'"),
        ({"optimizer": Lamb}, "update_in_backward=True with Lamb, which needs whole tensors"),
        ({"ignore_unused_parameters": False}, "finds out at the end of backward"),
    ],
)
def test_what_needs_all_gradients_first_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(sim.RankError, match=words):
        sim.run(1, lambda rank: build(**options))


def test_step_must_follow_each_backward_that_reduces() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build()
        loss_of(model).backward()
        with pytest.raises(ValueError, match="a second backward before step"):
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model).backward()
        loss_of(model, 1).backward()
        with pytest.raises(ValueError, match="between a backward and its step"):
            optimizer.zero_grad()
        with pytest.raises(ValueError, match="backward has used the gradients already"):
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # nothing to do, as without the option

    sim.run(2, fn)


def test_backward_updates_with_the_options_it_finds() -> None:
    def fn(rank: int, early: bool) -> dict[str, torch.Tensor]:
        model, optimizer = build(update_in_backward=early)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] /= 2
        return optimizer.consolidated_parameters()

    expected, got = (sim.run(2, lambda rank, e=early: fn(rank, e))[0] for early in (False, True))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_no_gradient_outlives_backward(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        seen: list[int] = []
        model[0].register_full_backward_hook(lambda *_: seen.append(optimizer.memory()["gradients"]))
        loss_of(model).backward()
        whole = sum(p.numel() for p in model.parameters()) * 4
        # In the end of backward: one bucket accumulates, two are being reduced, one waits for its piece.
        assert 0 < seen[0] <= 3 * whole // 4
        assert optimizer.memory()["gradients"] == optimizer.forecast().gradients_bytes == 0
        optimizer.step()

    sim.run(2, fn)


class Interrupted(Exception):
    pass


class Interrupt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise Interrupted


@pytest.mark.parametrize("at_end", [False, True])
def test_a_backward_that_breaks_off_leaves_no_half_step_behind(at_end: bool) -> None:
    """Before the first update it may be tried again; after it the state has to be loaded."""

    def fn(rank: int) -> None:
        model, optimizer = build()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        x = torch.randn(3, 8, requires_grad=True)
        broken = model[0] if at_end else model
        hook = broken.register_forward_hook(lambda module, args, output: Interrupt.apply(output))
        with pytest.raises(Interrupted):
            model(x).sum().backward()
        hook.remove()
        optimizer.zero_grad()
        if at_end:
            half = "a backward that updates ended with an exception"
            with pytest.raises(OffloadError, match=half):
                loss_of(model, 1).backward()
            # Values of two different steps are not to be read either, nor made up by writing.
            with pytest.raises(OffloadError, match=half):
                safe_get_full_fp32_param(model[0].weight)
            with pytest.raises(OffloadError, match=half):
                safe_set_full_fp32_param(model[0].weight, torch.zeros(8, 8))
            optimizer.zero_grad()
            optimizer.load_state_dict(saved)
        loss_of(model, 1).backward()
        optimizer.step()

    sim.run(1, fn)


def test_states_on_nvme_are_forecast_and_can_be_read_between_steps(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": tmp_path}

    def fn(rank: int) -> None:
        model, optimizer = build(offload_optimizer=nvme, offload_param={**nvme, "max_in_cpu": 0})
        for step in range(3):
            before = optimizer.nvme_traffic()
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            moved = tuple(b - a for a, b in zip(before, optimizer.nvme_traffic(), strict=True))
        forecast = optimizer.forecast()
        assert moved == (forecast.nvme_read_bytes, forecast.nvme_written_bytes)
        assert optimizer.sharded.scratch is not None
        # Nothing of the gradients: parameters, and two moments.
        assert forecast.tiers["nvme"] == 3 * sum(b.num_bytes for b in optimizer.buckets) // 2
        assert optimizer.sharded.scratch.pool.stats().peak_bytes <= forecast.buffers_bytes
        first = optimizer.state_dict()["slices"]
        again = optimizer.state_dict()["slices"]
        assert all(torch.equal(first[key], again[key]) for key in first)

    sim.run(2, fn)


def test_a_plan_without_ranks_has_it() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    optimizer = ZeroOptimizer(model, stage=3, lr=0.1, group=DryRun(4), update_in_backward=True)
    assert optimizer.forecast().gradients_bytes == 0


@pytest.mark.parametrize("stage", range(4))
def test_what_is_written_between_two_steps_stays(stage: int) -> None:
    def fn(rank: int) -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
        options: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.0, "param_persistence_threshold": 10**6}
        optimizer = ZeroOptimizer(model, stage=stage, update_in_backward=True, **options)
        for value in (0.5, 0.25):
            with torch.no_grad():
                model[1].bias.fill_(value)
            model(torch.ones(3, 8, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert bool((optimizer.consolidated_parameters()["1.bias"] == value).all())

    sim.run(2, fn)


def test_a_write_that_is_lost_is_told_before_the_update() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build()

        def write(module: Any, *_: Any) -> None:
            with torch.no_grad():
                module.bias.mul_(1.0)

        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = optimizer.consolidated_parameters()
        handle = model[3].register_forward_pre_hook(write)
        with pytest.raises(RuntimeError, match=r"3\.bias was written to in place"):
            loss_of(model).backward()
        handle.remove()
        optimizer.zero_grad()
        after = optimizer.consolidated_parameters()
        assert all(torch.equal(before[name], after[name]) for name in before)
        loss_of(model).backward()
        optimizer.step()

    sim.run(2, fn)
