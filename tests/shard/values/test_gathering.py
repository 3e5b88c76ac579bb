"""GatheredParameters: whole for a while; what is written reaches every place where the value lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.zero import GatheredParameters, Init, PartitionedAccessError, Stage3Optimizer, ZeroOptimizer


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def test_numpy_may_have_had_the_memory() -> None:
    """Its arrays keep memory from being resized: the parameters get another one, and training goes on."""

    def job(rank: int, exported: bool) -> list[Any]:
        model = small()
        optimizer = Stage3Optimizer(model, optimizer=torch.optim.AdamW, lr=0.1, param_persistence_threshold=0)
        train(model, optimizer, rank, range(2))
        with GatheredParameters(list(model.parameters())):
            held = [p.detach().numpy() for p in model.parameters()] if exported else []
            before = [array.copy() for array in held]
        train(model, optimizer, rank, range(2, 4))
        assert all((array == value).all() for array, value in zip(held, before, strict=True))
        with GatheredParameters(list(model.parameters())):
            return [p.detach().clone().tolist() for p in model.parameters()]

    assert sim.run(2, lambda rank: job(rank, True)) == sim.run(2, lambda rank: job(rank, False))


def train(model: nn.Module, optimizer: ZeroOptimizer, rank: int, steps: range) -> None:
    for step in steps:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.backward(model(x.to(next(iter(model.parameters())).dtype)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def tiers(kind: str, stage: int, path: Path) -> dict[str, Any]:
    if kind == "none":
        return {}
    section = {"device": kind, **({"nvme_path": path} if kind == "nvme" else {})}
    offload = {"offload_optimizer": section} if stage else {}
    return {**offload, **({"offload_param": {**section, "max_in_cpu": 0}} if stage == 3 else {})} if stage else {}


@given(
    stage=st.integers(0, 3), world=st.integers(1, 4), kind=st.sampled_from(["none", "cpu", "nvme"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), threshold=st.sampled_from([0, 10, 10**6]),
    modifier=st.integers(0, 3), steps=st.integers(0, 2), size=st.sampled_from([1, 10**6]),
    optimizer=st.sampled_from([torch.optim.AdamW, "zoo.AdamW"]),
)  # fmt: skip
def test_what_is_written_stays_written(
    tmp_path_factory: pytest.TempPathFactory, stage: int, world: int, kind: str, dtype: torch.dtype, threshold: int,
    modifier: int, steps: int, size: int, optimizer: Any,
) -> None:  # fmt: skip
    """Writing under GatheredParameters and training on equals what stage 0 computes that writes in memory."""
    folder = tmp_path_factory.mktemp("nvme")
    modifier %= world
    if optimizer == "zoo.AdamW":
        import zoo.optim

        optimizer = zoo.optim.AdamW

    def fn(rank: int, stage: int, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        model = small().to(dtype)
        opt = ZeroOptimizer(
            model, stage=stage, optimizer=optimizer, lr=0.01, param_persistence_threshold=threshold,
            reduce_bucket_size=size, **tiers(kind, stage, folder),
        )  # fmt: skip
        train(model, opt, rank, range(steps))
        with GatheredParameters([model[0].weight, model[2].bias], modifier_rank=modifier), torch.no_grad():
            if rank == modifier:
                model[0].weight[1:3] = 5.0
                model[2].bias.data.mul_(2.0).add_(1.0)
            else:
                model[0].weight.fill_(-1.0)  # is overwritten
        with GatheredParameters(p for p in model.parameters()):
            seen = model[0].weight.detach().clone()
            assert bool((seen[1:3] == 5.0).all())
        train(model, opt, rank, range(steps, steps + 2))
        found = opt.consolidated_parameters()
        opt.close()
        return found, seen

    expected = sim.run(world, lambda rank: fn(rank, 0, "none"))
    for found, seen in sim.run(world, lambda rank: fn(rank, stage, kind)):
        assert torch.equal(seen, expected[0][1])
        for name, value in found.items():
            assert torch.equal(value, expected[0][0][name]), name


def test_values_that_nobody_changed_keep_their_fp32_precision() -> None:
    def fn(rank: int, gather: bool) -> dict[str, torch.Tensor]:
        model = small().bfloat16()
        opt = Stage3Optimizer(model, lr=1e-4, param_persistence_threshold=0)
        for step in range(6):
            train(model, opt, rank, range(step, step + 1))
            if gather:
                with GatheredParameters(model.parameters(), modifier_rank=1):
                    pass
        return opt.consolidated_parameters()

    for with_it, without in zip(
        sim.run(2, lambda rank: fn(rank, True)), sim.run(2, lambda rank: fn(rank, False)), strict=True
    ):
        for name, value in with_it.items():
            assert torch.equal(value, without[name]), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reading_is_reading(stage: int) -> None:
    def fn(rank: int) -> None:
        model = small()
        opt = ZeroOptimizer(model, stage=stage, lr=0.1, param_persistence_threshold=0)
        expected = small()[0].weight
        with GatheredParameters(model[0].weight):
            with GatheredParameters([model[0].weight, model[0].bias], modifier_rank=0):
                pass
            assert torch.equal(model[0].weight, expected)
        with pytest.raises(RuntimeError, match=r"0\.weight was written"), GatheredParameters(model[0].weight):
            nn.init.zeros_(model[0].weight)
        if stage == 3:
            with pytest.raises(PartitionedAccessError):
                model[0].weight.sum()
            with GatheredParameters(model[0].weight):
                assert torch.equal(model[0].weight, expected)
            with pytest.raises(RuntimeError, match=r"0\.bias was written"):  # noqa: SIM117
                with GatheredParameters(model[0].weight, modifier_rank=0):
                    nn.init.zeros_(model[0].bias)
        opt.close()

    sim.run(2, fn)


def spoil(model: nn.Sequential, rank: int) -> None:
    with GatheredParameters(model[0].weight, modifier_rank=0):
        nn.init.constant_(model[0].weight, float(rank))
        raise ValueError("nobody likes it")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_exception_inside_changes_nothing(stage: int) -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        model = small()
        opt = ZeroOptimizer(model, stage=stage, lr=0.1, param_persistence_threshold=0)
        with pytest.raises(ValueError, match="nobody likes"):
            spoil(model, rank)
        return opt.consolidated_parameters()

    for found in sim.run(2, fn):
        assert torch.equal(found["0.weight"], small()[0].weight)


def test_during_training_what_is_gathered_for_backward_stays_right() -> None:
    def fn(rank: int, read: bool) -> dict[str, torch.Tensor]:
        model = small()
        opt = Stage3Optimizer(model, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1)
        for step in range(3):
            loss = model(torch.full((2, 4), float(rank + step))).square().mean()
            if read:
                with GatheredParameters(model.parameters()):
                    model[0].weight.sum()
                    model(torch.ones(1, 4))
            opt.backward(loss)
            if read:
                with GatheredParameters([model[2].weight]):
                    pass
            opt.step()
            opt.zero_grad()
        return opt.consolidated_parameters()

    expected = sim.run(2, lambda rank: fn(rank, False))
    for found, other in zip(sim.run(2, lambda rank: fn(rank, True)), expected, strict=True):
        for name, value in found.items():
            assert torch.equal(value, other[name]), name


@pytest.mark.matrix
@pytest.mark.parametrize("device", [None, "cpu", "nvme"])
def test_a_model_of_init_can_be_read_and_written(tmp_path: Path, device: str | None) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}

    def fn(rank: int) -> dict[str, torch.Tensor]:
        with Init(config=config, remote_device=device or "device"):
            model = small()
            with GatheredParameters(model[2].weight, modifier_rank=1):
                model[2].weight.data.fill_(float(rank))
        with GatheredParameters(model[0].weight):
            assert torch.equal(model[0].weight, small()[0].weight)
        with GatheredParameters(model.parameters(), modifier_rank=2):
            nn.init.constant_(model[0].bias, float(rank))
            with GatheredParameters(model[0].bias):
                pass
        with pytest.raises(RuntimeError, match=r"0\.bias was written"), GatheredParameters(model.parameters()):
            nn.init.zeros_(model[0].bias)
        with pytest.raises(PartitionedAccessError, match=r"0\.bias"):
            model[0].bias.sum()
        return Stage3Optimizer(model, lr=0.1).consolidated_parameters()

    for found in sim.run(3, fn):
        assert bool((found["0.bias"] == 2.0).all())
        assert bool((found["2.weight"] == 1.0).all())
        assert torch.equal(found["0.weight"], small()[0].weight)


def test_ranks_with_different_lists_are_named_and_bad_ranks_are_refused() -> None:
    def fn(rank: int) -> None:
        model = small()
        opt = Stage3Optimizer(model, lr=0.1, param_persistence_threshold=0)
        with GatheredParameters(model[2 * (rank % 2)].weight):
            opt.close()

    with pytest.raises(sim.RankError) as caught:
        sim.run(3, fn)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    model = small()
    opt = Stage3Optimizer(model, lr=0.1)
    with pytest.raises(ValueError, match=r"modifier_rank=3.*ranks 0 to 0"):  # noqa: SIM117
        with GatheredParameters(model.parameters(), modifier_rank=3):
            pass
    opt.close()


def test_ordinary_parameters_pass_through() -> None:
    model = small()
    with GatheredParameters(model.parameters(), modifier_rank=0):
        nn.init.zeros_(model[0].weight)
    assert not bool(model[0].weight.any())
    with GatheredParameters(model.parameters(), enabled=False), GatheredParameters([]):
        pass


class Fused(torch.autograd.Function):
    """x W^T, squared and summed; the gradients are computed in the forward, while W is whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight.T
        ctx.save_for_backward(2 * y @ weight, 2 * y.T @ x)
        return y.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad * x, grad * weight


class FusedHead(nn.Module):
    """Never calls its head: a fused loss takes the weight, gathered for as long as it runs."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reads = reads
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(torch.tanh(self.first(x)))
        if self.reads:
            with torch.no_grad(), GatheredParameters(self.first.weight):
                assert self.first.weight.shape == (6, 4)
        with GatheredParameters(self.head.weight):
            out: torch.Tensor = Fused.apply(h, self.head.weight)
        return out


@given(
    world=st.integers(1, 3), size=st.sampled_from([1, 10**6]), overlap=st.booleans(), reads=st.booleans(),
    order=st.permutations(["first", "second", "head"]),
)  # fmt: skip
def test_what_a_forward_gathers_for_itself_gets_its_gradient(
    world: int, size: int, overlap: bool, reads: bool, order: list[str]
) -> None:
    """Training so at stage 3 equals stage 0, wherever the parameter stands among those of the model."""

    def fn(rank: int, stage: int) -> dict[str, torch.Tensor]:
        model = FusedHead(reads)
        model._modules = {name: model._modules[name] for name in order}
        opt = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.AdamW, lr=0.01, param_persistence_threshold=0,
            reduce_bucket_size=size, overlap_comm=overlap,
        )  # fmt: skip
        for step in range(3):
            opt.backward(model(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))))
            opt.step()
            opt.zero_grad()
        found = opt.consolidated_parameters()
        opt.close()
        return found

    expected = sim.run(world, lambda rank: fn(rank, 0))
    for found in sim.run(world, lambda rank: fn(rank, 3)):
        torch.testing.assert_close(found, expected[0])
