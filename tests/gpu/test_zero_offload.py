"""Offloading from a real device: states and gradients go to the host and to NVMe and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo.optim import AdamW
from zoo.zero import Precision, ZeroOptimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def run(
    stage: int, dtype: torch.dtype, computes: torch.dtype | None = None, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to("cuda", dtype)
    model[1].requires_grad_(computes is None)
    optimizer = ZeroOptimizer(
        model, stage=stage, optimizer=AdamW, lr=0.01, clip_norm=0.1, param_persistence_threshold=0,
        reduce_bucket_size=4500, sub_group_size=4500, precision=Precision(param=computes), **options,
    )  # fmt: skip
    losses = []
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, optimizer.consolidated_parameters()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "computes"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("states", ["cpu", "nvme"])
def test_tiers_change_nothing(
    tmp_path: Path, stage: int, dtype: torch.dtype, computes: torch.dtype | None, states: str
) -> None:
    options: dict[str, Any] = {"offload_optimizer": {"device": states, "nvme_path": tmp_path, "pin_memory": True}}
    if stage == 3:
        options["offload_param"] = {"device": states, "nvme_path": tmp_path, "max_in_cpu": 0}
    expected = run(stage, dtype, computes)
    found = run(stage, dtype, computes, **options)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in found[1].items():
        torch.testing.assert_close(value, expected[1][name], rtol=1e-5, atol=1e-6)
