"""Writes that raise no version counter: what NumPy, DLPack and collectives write into a parameter's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.blocks import Blocks

from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.zero import GatheredParameters, Precision, ZeroOptimizer


def by_numpy(parameter: torch.Tensor, value: torch.Tensor) -> None:
    parameter.detach().view(torch.int16).numpy()[...] = value.view(torch.int16).numpy()


def by_dlpack(parameter: torch.Tensor, value: torch.Tensor) -> None:
    torch.from_dlpack(parameter.detach().view(torch.int16)).copy_(value.view(torch.int16))


def build(stage: int, **options: Any) -> tuple[Blocks, ZeroOptimizer]:
    model = Blocks()
    given = {
        "optimizer": torch.optim.SGD,
        "lr": 2.0**-6,
        "precision": Precision(param=torch.bfloat16),
        "max_live_parameters": 0,
    }
    return model, ZeroOptimizer(model, stage=stage, **{**given, "param_persistence_threshold": 0, **options})


def one_step(model: Blocks, optimizer: ZeroOptimizer, rank: int) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.matrix
@pytest.mark.parametrize("write", [by_numpy, by_dlpack])
@pytest.mark.parametrize("options", [{}, {"offload_optimizer": {"device": "cpu"}}, {"reduce_bucket_size": 1}])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_masters_take_over_what_nothing_counted(
    stage: int, options: dict[str, Any], write: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    if stage == 0 and "offload_optimizer" in options:
        return  # not a thing of stage 0

    def fn(rank: int) -> None:
        results = []
        for way in (write, torch.Tensor.copy_):
            model, optimizer = build(stage, **options)
            one_step(model, optimizer, rank)
            for name in ("first.weight", "blocks.1.bias", "last.bias"):
                parameter = model.get_parameter(name)
                value = torch.full(parameter.shape, 0.375, dtype=torch.bfloat16)
                with torch.no_grad():
                    way(parameter, value)
            one_step(model, optimizer, rank)
            one_step(model, optimizer, rank)
            results.append({n: v.clone() for n, v in optimizer.consolidated_parameters().items()})
        by_it, by_torch = results
        for name, value in by_torch.items():
            assert torch.equal(by_it[name], value), name
        assert (by_torch["last.bias"] - 0.375).abs().max() < 0.1

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [1, 2])  # at stage 0 a step sends no numbers of each rank
def test_other_values_on_some_rank_are_told(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, clip_norm=1.0)
        one_step(model, optimizer, rank)
        with torch.no_grad():
            by_numpy(model.last.bias, torch.full((2,), 0.5 + rank, dtype=torch.bfloat16))
        with pytest.raises(CollectiveMismatchError, match="the values that were written into parameters"):
            one_step(model, optimizer, rank)

    sim.run(2, fn)


@pytest.mark.parametrize("stage", range(4))
def test_what_would_be_lost_where_parameters_are_gathered_is_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        one_step(model, optimizer, rank)
        before = {n: v.clone() for n, v in optimizer.consolidated_parameters().items()}
        if stage == 3:
            with (
                pytest.raises(RuntimeError, match=r"blocks\.1\.weight was written to inside GatheredParameters"),
                GatheredParameters([model.first.weight, model.blocks[1].weight]),
            ):
                by_numpy(model.blocks[1].weight, torch.ones(6, 6, dtype=torch.bfloat16))
            after = optimizer.consolidated_parameters()
            assert all(torch.equal(after[name], value) for name, value in before.items())
        with GatheredParameters([model.first.weight], modifier_rank=1):
            by_numpy(model.first.weight, torch.full((6, 4), 0.25 + rank, dtype=torch.bfloat16))
        written = optimizer.consolidated_parameters()
        assert torch.equal(written["first.weight"], torch.full((6, 4), 1.25))
        one_step(model, optimizer, rank)
        assert (optimizer.consolidated_parameters()["first.weight"] - 1.25).abs().max() < 0.1

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_the_runtime_writes_is_no_write_of_the_user(stage: int) -> None:
    """Steps, loaded states and values that are set count nothing: ``versions`` stay."""

    def fn(rank: int) -> None:
        from zoo.zero import safe_get_full_fp32_param, safe_set_full_fp32_param

        model, optimizer = build(stage)
        taken: list[tuple[int, int]] = []
        writes = optimizer.sharded.writes
        wrote = writes.wrote
        writes.wrote = lambda bucket, slot, *more: (taken.append((bucket.index, slot)), wrote(bucket, slot, *more))[1]  # type: ignore[method-assign,misc,assignment]
        one_step(model, optimizer, rank)
        state = optimizer.state_dict()
        one_step(model, optimizer, rank)
        optimizer.load_state_dict(state)
        one_step(model, optimizer, rank)
        assert taken == []
        value = safe_get_full_fp32_param(model.last.bias)
        assert value is not None
        safe_set_full_fp32_param(model.last.bias, value + 1)
        one_step(model, optimizer, rank)
        assert len(taken) <= 1

    sim.run(2, fn)
