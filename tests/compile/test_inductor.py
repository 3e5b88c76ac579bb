"""Whole graphs with code of inductor: the same communication, and losses as near as torch's own code has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.compile.models import Model, Shape, batch

from zoo import sim
from zoo.compile import compile_whole
from zoo.zero import ZeroOptimizer

STEPS = 12


def train(rank: int, shape: Shape, dtype: torch.dtype, compiles: bool) -> tuple[list[float], list[Any], list[int]]:
    model = Model(shape).to(dtype)
    optimizer = ZeroOptimizer(
        model, stage=3, optimizer=torch.optim.SGD, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1,
        max_live_parameters=500,
    )  # fmt: skip
    # Fused operations round once where each of the model's rounds, unless inductor is told otherwise.
    whole = compile_whole(optimizer.sharded, options={"emulate_precision_casts": True}) if compiles else None
    losses, starts, peaks = [], [], []
    for step in range(STEPS):
        with optimizer.sharded.record() as actions:
            loss = model(batch(step, rank))["loss"]
            optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        starts.append(actions.starts())
        peaks.append(max(actions.whole_bytes()))
    assert whole is None or not whole.reasons
    return losses, starts, peaks


def plain(shape: Shape, dtype: torch.dtype, compiles: bool) -> list[float]:
    """Losses of one process without zoo."""
    model: Any = Model(shape).to(dtype)
    called = torch.compile(model, options={"emulate_precision_casts": True}) if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = called(batch(step, 0))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def apart(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True)) / max(others)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_trains_as_the_hooks_do(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    shape = Shape(1, tied=True)
    tolerance = 1e-6
    if dtype is torch.bfloat16:  # each rounding grows; what torch's own code is away from what it does without
        tolerance = 2 * apart(plain(shape, dtype, True), plain(shape, dtype, False))
        torch._dynamo.reset()
    graphs, hooks = (sim.run(2, lambda rank, c=c: train(rank, shape, dtype, c)) for c in (True, False))
    for (losses, starts, peaks), (right, others, bytes_) in zip(graphs, hooks, strict=True):
        assert starts == others
        assert peaks == bytes_
        assert apart(losses, right) <= tolerance


class Lower(Model):
    """It computes in bfloat16, with parameters in fp32."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(tokens)


@pytest.mark.slow
def test_casts_of_parameters_are_made_again_in_backward() -> None:
    def fn(compiles: bool) -> list[float]:
        torch._dynamo.reset()
        model = Lower(Shape(1))
        optimizer = ZeroOptimizer(
            model, stage=3, optimizer=torch.optim.SGD, lr=0.1, param_persistence_threshold=0, max_live_parameters=0
        )
        whole = compile_whole(optimizer.sharded) if compiles else None
        losses = []
        for step in range(3):
            loss = model(batch(step, 0))["loss"]
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert whole is None or not whole.reasons
        assert whole is None or any(plan.remade for plan in whole.plans)
        return losses

    assert apart(fn(True), fn(False)) < 0.01


class Images(torch.nn.Module):
    """Inductor computes convolutions with channels last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = torch.relu(self.first(x))
        return inner, self.last(inner)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_outputs_have_the_strides_that_they_have_uncompiled(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    x = torch.randn(2, 3, 12, 12)
    right = [out.stride() for out in Images()(x)]
    model = Images()
    optimizer = ZeroOptimizer(model, stage=stage, lr=0.1, optimizer=torch.optim.SGD)
    whole = compile_whole(optimizer.sharded)
    outputs = model(x)
    assert [out.stride() for out in outputs] == right
    assert not whole.reasons
    optimizer.backward(outputs[1].view(-1).sum())


@pytest.mark.slow
def test_a_second_start_finds_its_code_and_runs_its_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters = torch._dynamo.utils.counters
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        ((losses, starts, _),) = sim.run(1, lambda rank: train(rank, Shape(1), torch.float32, True))
        found.append((losses, starts))
    assert counters["inductor"]["fxgraph_cache_hit"] == 2  # forward and backward
    assert not counters["inductor"]["fxgraph_cache_miss"]
    assert found[0] == found[1]
