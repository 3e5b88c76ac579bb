"""State access: what is read is what one process has; what is set is what training goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.shard.values.test_gathering import small, tiers, train
from torch import nn

import zoo.optim
from zoo import sim, zero
from zoo.zero import Init, Stage3Optimizer, ZeroOptimizer

drawn = given(
    stage=st.integers(0, 3), world=st.integers(1, 4), kind=st.sampled_from(["none", "cpu", "nvme"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), threshold=st.sampled_from([0, 10, 10**6]),
    size=st.sampled_from([1, 10**6]), own=st.booleans(),
)  # fmt: skip


def make(
    rank: int, stage: int, kind: str, dtype: torch.dtype, threshold: int, size: int, own: bool, folder: Path,
    **more: Any,
) -> tuple[nn.Sequential, ZeroOptimizer]:  # fmt: skip
    model = small().to(dtype)
    model[2].bias.requires_grad_(False)
    optimizer = zoo.optim.AdamW if own else torch.optim.AdamW
    return model, ZeroOptimizer(
        model, stage=stage, optimizer=optimizer, lr=0.01, param_persistence_threshold=threshold,
        reduce_bucket_size=size, **tiers(kind, stage, folder), **more,
    )  # fmt: skip


def backward(model: nn.Module, opt: ZeroOptimizer, rank: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(77 + rank)).to(dtype)
    opt.backward(model(x).square().mean())


@drawn
def test_everything_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, stage: int, world: int, kind: str, dtype: torch.dtype, threshold: int,
    size: int, own: bool,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("nvme")

    def fn(rank: int, stage: int, kind: str) -> dict[str, Any]:
        model, opt = make(rank, stage, kind, dtype, threshold, size, own, folder)
        named = dict(model.named_parameters())
        assert zero.safe_get_full_optimizer_state(model[0].weight, "exp_avg") is None
        assert zero.safe_get_full_grad(model[0].weight) is None
        train(model, opt, rank, range(2))
        backward(model, opt, rank, dtype)
        found: dict[str, Any] = {}
        for name, p in named.items():
            found[f"{name} value"] = zero.safe_get_full_fp32_param(p)
            found[f"{name} grad"] = zero.safe_get_full_grad(p)
            found[f"{name} exp_avg"] = zero.safe_get_full_optimizer_state(p, "exp_avg")
            found[f"{name} step"] = zero.safe_get_full_optimizer_state(p, "step")
            local = [
                ("value", zero.safe_get_local_fp32_param(p)), ("grad", zero.safe_get_local_grad(p)),
                ("exp_avg", zero.safe_get_local_optimizer_state(p, "exp_avg")),
            ]  # fmt: skip
            for what, part in local:
                if part is not None:
                    found[f"{name} local {what}"] = part
        for what, pairs in (
            ("value", zero.get_full_fp32_params(named.values())),
            ("grad", zero.get_full_grads(named.values())),
            ("exp_avg", zero.get_full_optimizer_states(named.values(), "exp_avg")),
        ):
            for name, value in pairs:
                one = found[f"{name} {what}"]
                assert (value is None) == (one is None)
                assert value is None or torch.equal(value, one)
        with pytest.raises(ValueError, match=r"'momentum'.*'exp_avg'"):
            zero.safe_get_full_optimizer_state(model[0].weight, "momentum")
        opt.close()
        return found

    expected = sim.run(world, lambda rank: fn(rank, 0, "none"))[0]
    runs = sim.run(world, lambda rank: fn(rank, stage, kind))
    for found in runs:
        for key, value in found.items():
            if " local " in key:
                continue
            assert (value is None) == (expected[key] is None), key
            assert value is None or (value.dtype == torch.float32 and torch.equal(value, expected[key])), key
    for key in runs[0]:
        if " local " in key:  # the parts of all ranks are the whole
            parts = [runs[0][key]] if stage == 0 else [found[key] for found in runs if key in found]
            assert torch.equal(torch.cat(parts), expected[key.replace(" local", "")].flatten()), key


@drawn
def test_what_is_set_is_what_training_goes_on_with(
    tmp_path_factory: pytest.TempPathFactory, stage: int, world: int, kind: str, dtype: torch.dtype, threshold: int,
    size: int, own: bool,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("nvme")

    def fn(rank: int, stage: int, kind: str, local: bool) -> dict[str, torch.Tensor]:
        model, opt = make(rank, stage, kind, dtype, threshold, size, own, folder)
        train(model, opt, rank, range(1))
        weight, bias, frozen = model[0].weight, model[0].bias, model[2].bias
        values = torch.linspace(-1, 1, 24).view(6, 4) / 3
        if local:
            mine = zero.safe_get_local_fp32_param(weight)
            zero.safe_set_full_fp32_param(weight, torch.zeros(6, 4))
            # Where this rank's elements are shows in a tensor that holds positions.
            zero.safe_set_full_optimizer_state(weight, torch.arange(24.0).view(6, 4), "exp_avg")
            where = zero.safe_get_local_optimizer_state(weight, "exp_avg").long()
            zero.safe_set_local_fp32_param(weight, values.flatten()[where])
            zero.safe_set_local_optimizer_state(weight, values.flatten()[where] + 2, "exp_avg")
            assert mine.numel() == where.numel()
        else:
            zero.safe_set_full_fp32_param(weight, values + rank)  # rank 0 counts
            zero.safe_set_full_optimizer_state(weight, values + 2, "exp_avg")
        zero.safe_set_full_fp32_param(frozen, torch.full((4,), 0.7))
        assert torch.equal(zero.safe_get_full_fp32_param(weight), values)
        assert torch.equal(zero.safe_get_full_optimizer_state(weight, "exp_avg"), values + 2)
        backward(model, opt, rank, dtype)
        if local:
            zero.safe_set_local_grad(bias, torch.full_like(zero.safe_get_local_grad(bias), 0.5))
        else:
            zero.safe_set_full_grad(bias, torch.full((6,), 0.5))
        assert torch.equal(zero.safe_get_full_grad(bias), torch.full((6,), 0.5))
        opt.step()
        opt.zero_grad()
        train(model, opt, rank, range(2, 3))
        found = opt.consolidated_parameters()
        opt.close()
        return found

    expected = sim.run(world, lambda rank: fn(rank, 0, "none", False))[0]
    for local in [False, True] if stage else [False]:
        for found in sim.run(world, lambda rank, local=local: fn(rank, stage, kind, local)):
            for name, value in found.items():
                assert torch.equal(value, expected[name]), (name, local)


@drawn
def test_what_is_set_before_the_first_step_keeps_its_bits(
    tmp_path_factory: pytest.TempPathFactory, stage: int, world: int, kind: str, dtype: torch.dtype, threshold: int,
    size: int, own: bool,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("nvme")
    values = torch.linspace(-1, 1, 24).view(6, 4) / 3

    def fn(rank: int, stage: int, kind: str, local: bool) -> tuple[torch.Tensor, ...]:
        model, opt = make(rank, stage, kind, dtype, threshold, size, own, folder)
        weight, bias = model[0].weight, model[0].bias
        if local:
            positions = torch.arange(24.0).view(6, 4)
            zero.safe_set_full_fp32_param(weight, positions)
            where = zero.safe_get_local_fp32_param(weight).long()
            zero.safe_set_local_fp32_param(weight, values.flatten()[where])
        else:
            zero.safe_set_full_fp32_param(weight, values)
        before = zero.safe_get_full_fp32_param(weight), zero.safe_get_full_fp32_param(bias)
        assert torch.equal(before[0], values)
        assert torch.equal(before[1], small()[0].bias.to(dtype).float())
        assert zero.safe_get_full_optimizer_state(weight, "exp_avg") is None
        opt.load_state_dict(opt.state_dict())
        assert torch.equal(zero.safe_get_full_fp32_param(weight), values)
        train(model, opt, rank, range(1))
        found = zero.safe_get_full_fp32_param(weight)
        opt.close()
        return *before, found

    expected = sim.run(world, lambda rank: fn(rank, 0, "none", False))[0]
    assert torch.allclose(expected[-1], values, atol=0.011)  # one step of Adam at 0.01
    # A step from the rounded values would end elsewhere.
    rounded = values.bfloat16().float()
    assert (expected[-1] - values).abs().max() < (expected[-1] - rounded).abs().max() or dtype is torch.float32
    for local in [False, True] if stage else [False]:
        for found in sim.run(world, lambda rank, local=local: fn(rank, stage, kind, local)):
            assert all(map(torch.equal, found, expected))


def test_the_loss_scale_is_not_part_of_the_gradient() -> None:
    def fn(rank: int, scale: float | None) -> torch.Tensor:
        model = small()
        opt = Stage3Optimizer(model, lr=0.1, loss_scale=scale)
        with opt.no_sync():
            backward(model, opt, rank, torch.float32)
        found = zero.safe_get_full_grad(model[0].weight)
        zero.safe_set_full_grad(model[0].weight, 2 * found)
        assert torch.equal(zero.safe_get_full_grad(model[0].weight), 2 * found)
        return found

    plain, scaled = sim.run(2, lambda rank: fn(rank, None)), sim.run(2, lambda rank: fn(rank, 1024.0))
    assert torch.equal(plain[0], scaled[1])


def test_mistakes_say_what_is_wrong() -> None:
    model = small()
    with pytest.raises(ValueError, match="not a parameter of a ZeRO optimizer"):
        zero.safe_get_full_fp32_param(model[0].weight)
    with Init():
        early = small()
    with pytest.raises(ValueError, match="Init partitioned it"):
        zero.safe_get_full_grad(early[0].weight)

    def fn(rank: int) -> None:
        model = small()
        opt = ZeroOptimizer(model, stage=2 * rank * 0, lr=0.1)
        weight = model[0].weight
        with pytest.raises(ValueError, match=r"\(6, 4\).*\(4, 6\)"):
            zero.safe_set_full_fp32_param(weight, torch.zeros(4, 6))
        with pytest.raises(ValueError, match="first step"):
            zero.safe_set_full_optimizer_state(weight, torch.zeros(6, 4), "exp_avg")
        with pytest.raises(ValueError, match="between backward and step"):
            zero.safe_set_full_grad(weight, torch.zeros(6, 4))
        with pytest.raises(ValueError, match="stage 0"):
            zero.safe_set_local_fp32_param(weight, torch.zeros(24))
        train(model, opt, rank, range(1))
        with pytest.raises(ValueError, match="one number"):
            zero.safe_set_full_optimizer_state(weight, torch.zeros(6, 4), "step")

    sim.run(2, fn)

    def short(rank: int) -> None:
        model = small()
        opt = Stage3Optimizer(model, lr=0.1, param_persistence_threshold=0)
        with pytest.raises(ValueError, match=r"elements \[\d+, \d+\) of '0.weight'"):
            zero.safe_set_local_fp32_param(model[0].weight, torch.zeros(99))
        with zero.GatheredParameters(model[0].weight), pytest.raises(ValueError, match="in use"):
            zero.safe_set_full_fp32_param(model[0].weight, torch.zeros(6, 4))
        opt.empty_partition_cache()

    sim.run(2, short)


def test_the_partition_cache_can_be_emptied() -> None:
    def fn(rank: int) -> None:
        model = small()
        opt = Stage3Optimizer(model, lr=0.1, param_persistence_threshold=0)
        model(torch.ones(1, 4))  # keeps what a backward would need
        assert opt.memory()["parameters"] > 58 * 4
        opt.empty_partition_cache()
        shards = opt.memory()["parameters"]
        assert shards < 58 * 4
        train(model, opt, rank, range(1))
        opt.empty_partition_cache()
        assert opt.memory()["parameters"] == shards

    sim.run(2, fn)


def test_states_that_only_the_last_rank_has_are_read_on_all() -> None:
    """One bucket of two groups: the first rank keeps nothing of the second group."""

    def fn(rank: int) -> None:
        model = nn.Linear(8, 4)
        opt = Stage3Optimizer(
            model, optimizer=torch.optim.AdamW, lr=0.01, param_persistence_threshold=0,
            params=[{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}],
        )  # fmt: skip
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        assert zero.safe_get_local_fp32_param(model.bias).numel() == (4 if rank == 1 else 0)
        found = zero.safe_get_full_optimizer_state(model.bias, "exp_avg")
        assert torch.allclose(found, torch.full((4,), 0.2))
        assert float(zero.safe_get_full_optimizer_state(model.bias, "step")) == 1.0

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("bad", [None, torch.zeros(3)], ids=["none", "shape"])
def test_a_value_that_does_not_fit_on_one_rank_is_refused_on_all(stage: int, bad: Any) -> None:
    """Nothing is set, nobody waits, and the next call sets."""

    def fn(rank: int) -> None:
        model = small()
        opt = ZeroOptimizer(model, stage=stage, optimizer=torch.optim.AdamW, lr=0.01, param_persistence_threshold=0)
        train(model, opt, rank, range(1))
        backward(model, opt, rank, torch.float32)
        weight = model[0].weight
        before = zero.safe_get_full_fp32_param(weight)
        given = bad if rank == 1 else torch.ones(before.shape)
        setters = [
            zero.safe_set_full_fp32_param, zero.safe_set_full_grad,
            lambda p, v: zero.safe_set_full_optimizer_state(p, v, "exp_avg"),
        ]  # fmt: skip
        setters += [zero.safe_set_local_fp32_param] if stage == 1 else []
        for setter in setters:
            with pytest.raises(ValueError, match=r"setting a value of '0\.weight' failed.*rank 1.*Nothing was set"):
                setter(weight, given)
        assert torch.equal(zero.safe_get_full_fp32_param(weight), before)
        for setter in setters[:3]:
            setter(weight, torch.ones(before.shape))
        assert torch.equal(zero.safe_get_full_fp32_param(weight), torch.ones(before.shape))
        assert torch.equal(zero.safe_get_full_optimizer_state(weight, "exp_avg"), torch.ones(before.shape))

    sim.run(2, fn)
