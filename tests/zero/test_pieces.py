"""An update is one step of the wrapped optimizer, in however many pieces it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo.zero import ZeroOptimizer


class Decays(torch.optim.Optimizer):
    """p -= lr / k g in step k, which is counted in the groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["k"])


class CountsInItself(Decays):
    """The same, counted in an attribute."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = self.count
        self.count += 1
        super().step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_counts_in_itself_updates_in_one_piece(dtype: torch.dtype, tmp_path: Path) -> None:
    def build_(**options: Any) -> ZeroOptimizer:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).to(dtype)
        given = {"sub_group_size": 1, "reduce_bucket_size": 1, **options}
        return ZeroOptimizer(model, stage=2, optimizer=CountsInItself, lr=0.5, **given)

    assert len(build_(loss_scale=2.0).updater.pieces()) == 1
    with pytest.raises(NotImplementedError, match=r"states on NVMe with CountsInItself, which counts the calls"):
        build_(offload_optimizer={"device": "nvme", "nvme_path": str(tmp_path)})
    with pytest.raises(NotImplementedError, match=r"update_in_backward=True with CountsInItself"):
        build_(update_in_backward=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_in_pieces_is_one_step(stage: int, dtype: torch.dtype) -> None:
    def train(pieces: int) -> tuple[dict[str, torch.Tensor], list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=Decays, lr=0.5, loss_scale=2.0, reduce_bucket_size=1,
            sub_group_size=10**9 if pieces == 1 else 1,
        )  # fmt: skip
        for step in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert (len(optimizer.updater.pieces()) == 1) == (pieces == 1)
        return optimizer.consolidated_parameters(), [g["k"] for g in optimizer.inner.param_groups]

    (one, counted), (several, also) = train(1), train(4)
    assert counted == also == [3]
    assert all(torch.equal(one[name], several[name]) for name in one)
