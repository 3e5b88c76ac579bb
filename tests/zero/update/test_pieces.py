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


class Counting(torch.optim.Optimizer):
    """Keeps numbers of several kinds, and what no checkpoint holds if it is asked to."""

    def __init__(self, params: Any, lr: float = 0.1, odd: Any = None) -> None:
        super().__init__(params, {"lr": lr})
        self.odd = odd

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, warm=False, rate=0.5, sum=torch.zeros_like(p), times=torch.zeros(()))
                    if self.odd is not None:
                        state["odd"] = self.odd
                state["step"] += 1
                state["warm"] = True
                state["times"] += 1
                state["sum"] += p.grad
                p.sub_(state["sum"], alpha=group["lr"] * [1.0, 0.5, 0.25][state["step"] % 3])


def counted(odd: Any = None) -> tuple[nn.Linear, ZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, ZeroOptimizer(model, stage=1, optimizer=Counting(model.parameters(), odd=odd))


def stepped(model: nn.Linear, optimizer: ZeroOptimizer) -> None:
    optimizer.backward(model(torch.ones(1, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_numbers_come_back_as_what_they_were() -> None:
    model, optimizer = counted()
    for _ in range(2):
        stepped(model, optimizer)
    (before,) = optimizer.inner.state.values()
    kept = {(s.name, s.role): s.tensor.clone() for s in optimizer.state_slices()}
    scalars = optimizer.state_scalars()
    again, other = counted()
    other.load_state(lambda name, role, start, n: kept[name, role][start : start + n], scalars)
    (after,) = other.inner.state.values()
    for role in ("step", "warm", "rate"):
        assert (type(after[role]), after[role]) == (type(before[role]), before[role])
    assert torch.equal(after["times"], before["times"])
    for one, its in ((model, optimizer), (again, other)):
        stepped(one, its)
    assert torch.equal(model.weight, again.weight)


@pytest.mark.parametrize("odd", [torch.zeros(3), "begin", [1]])
def test_a_state_that_cannot_be_saved_is_named(odd: Any) -> None:
    model, optimizer = counted(odd)
    stepped(model, optimizer)
    with pytest.raises(ValueError, match=r"keeps the state 'odd' of 'weight', .*; states that can be saved are"):
        optimizer.state_scalars()
