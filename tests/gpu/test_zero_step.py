"""Steps on a real device: nothing waits for it where the optimizer is told on the device, and the bits are the same."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from zoo import optim
from zoo.engine import initialize
from zoo.zero import LossScaler, ZeroOptimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


class Waits(ZeroOptimizer):
    """Reads at once, as on the CPU."""

    _reads_late = False


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """torch raises where an operation makes the host wait; the event of an outcome is none of those."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to("cuda", dtype)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, optim.AdamW, optim.Lion])
@pytest.mark.parametrize("clip", [0.05, math.inf])
@pytest.mark.parametrize(("dtype", "scaled"), [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)])
def test_the_bits_are_those_of_steps_that_are_waited_for(
    stage: int, kind: Any, clip: float, dtype: torch.dtype, scaled: bool
) -> None:
    found: list[list[Any]] = []
    for cls in (Waits, ZeroOptimizer):
        model = net(dtype)
        more: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        more |= {"capturable": True} if kind in (optim.AdamW, optim.Lion) else {"fused": True}
        optimizer = cls(
            model, stage=stage, optimizer=kind, lr=0.01, clip_norm=clip, reduce_bucket_size=4500,
            param_persistence_threshold=0, optimizer_options=more,
            loss_scale=LossScaler(scale=96.0, window=2, hysteresis=1) if scaled else None,
        )  # fmt: skip
        told: list[Any] = []
        for step in range(6):
            loss = model(batch(step, dtype)).square().mean()
            optimizer.backward(loss * math.inf if step in (0, 3) else loss)
            optimizer.step(tally=torch.ones(2, device="cuda"))
            if step != 4:
                optimizer.zero_grad()
        told += [optimizer.grad_norm, optimizer.num_skipped, optimizer.tallied, optimizer.loss_scale]
        assert optimizer.num_skipped == 2
        values = [*optimizer.consolidated_parameters().values(), *optimizer.state_dict()["slices"].values()]
        found.append([told, [v.cpu().contiguous().view(torch.uint8).tolist() for v in values]])
        optimizer.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_of_the_engine_waits_for_nothing(stage: int, scaled: bool) -> None:
    model = net(torch.float32)
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "fp16": {"enabled": scaled, "initial_scale_power": 8},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.01}},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).square().mean()

    engine = initialize(document, Task(), optimizer=optimizer)[0]
    batches = [batch(step, torch.float16 if scaled else torch.float32) for step in range(2)]
    for _ in range(3):  # states, buffers and cuBLAS workspaces are there afterwards
        engine.train_batch(iter(batches))
    with waiting_is_an_error():
        for _ in range(3):
            torch.cuda._sleep(20_000_000)
            loss = engine.train_batch(iter(batches))
            assert engine.optimizer.outcome is not None
            for x in batches:
                engine.backward(engine(x))
                engine.step()
    assert engine.record is not None
    assert engine.record.step == engine.global_steps == 9
    assert engine.skipped_steps == 0
    assert bool(loss.isfinite())
    engine.destroy()
