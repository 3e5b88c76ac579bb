"""``GatheredParameters`` of what ``Init`` has partitioned, while no optimizer has it yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.comm import RankFailedError
from zoo.zero import GatheredParameters, Init


@pytest.mark.parametrize("write", [lambda p: p.data.fill_(9.0), lambda p: torch.no_grad()(p.fill_)(9.0)])
def test_a_write_that_would_be_lost_is_refused_before_an_optimizer_too(write: Callable[[Any], Any]) -> None:
    def fn(rank: int) -> None:
        with Init():
            layer = nn.Linear(4, 4)
        with GatheredParameters(layer.weight, modifier_rank=1):
            layer.weight.data.fill_(float(rank))
        with pytest.raises(RuntimeError, match="would be lost"), GatheredParameters(layer.weight):
            write(layer.weight)
        for _ in range(2):
            with GatheredParameters(layer.weight):
                assert bool((layer.weight == 1).all())
                layer.weight.data.sum()
        with GatheredParameters(layer.weight), GatheredParameters(layer.weight, modifier_rank=0):
            layer.weight.data.add_(1.0)
        with GatheredParameters(layer.weight):
            assert bool((layer.weight == 2).all())

    sim.run(2, fn)


def test_an_exception_on_one_rank_before_an_optimizer_is_told_to_all() -> None:
    def write(parameter: nn.Parameter, rank: int) -> None:
        parameter.data.fill_(5.0)
        if rank == 1:
            raise KeyError("one")

    def fn(rank: int) -> None:
        with Init():
            layer = nn.Linear(4, 4)
        with GatheredParameters(layer.weight, modifier_rank=1):
            layer.weight.data.fill_(1.0)
        told = (KeyError, "one") if rank == 1 else (RankFailedError, "rank 1 failed with KeyError")
        with pytest.raises(told[0], match=told[1]), GatheredParameters(layer.weight, modifier_rank=0):
            write(layer.weight, rank)
        with GatheredParameters(layer.weight):
            assert bool((layer.weight == 1).all())

    sim.run(2, fn)


def test_what_a_rank_writes_while_other_initialisers_run_is_kept() -> None:
    def fn(rank: int) -> None:
        with Init():
            one, other = nn.Linear(4, 4), nn.Linear(4, 4)
            with GatheredParameters(one.weight, modifier_rank=1):
                if rank == 1:
                    one.weight.data.fill_(7.0)
                nn.init.zeros_(other.bias)
            one.weight.data.mul_(2.0)
        with GatheredParameters([one.weight, other.bias]):
            assert bool((one.weight == 14).all())
            assert not bool(other.bias.any())

    sim.run(2, fn)


def test_an_exception_inside_of_init_leaves_what_was_there_before() -> None:
    def write(parameter: nn.Parameter) -> None:
        parameter.data.fill_(7.0)
        raise KeyError("inside")

    def fn(rank: int) -> None:
        with Init():
            layer = nn.Linear(4, 4)
            with torch.no_grad():
                layer.weight.fill_(3.0)
            with pytest.raises(KeyError, match="inside"), GatheredParameters(layer.weight, modifier_rank=0):
                write(layer.weight)
            layer.weight.data.add_(1.0)
        with GatheredParameters(layer.weight):
            assert bool((layer.weight == 4).all())

    sim.run(2, fn)


@pytest.mark.parametrize("inside", [False, True])
def test_data_is_assigned_while_a_parameter_is_gathered(inside: bool) -> None:
    def fn(rank: int) -> None:
        with Init():
            layer = nn.Linear(4, 4)
            if inside:
                assign(layer, rank)
        if not inside:
            assign(layer, rank)
        with GatheredParameters(layer.weight):
            assert bool((layer.weight == 1).all())

    def assign(layer: nn.Linear, rank: int) -> None:
        with GatheredParameters(layer.weight, modifier_rank=1):
            if rank == 1:
                with pytest.raises(ValueError, match=r"shape \(4, 4\).* given \(2,\)"):
                    layer.weight.data = torch.ones(2)
                layer.weight.data = torch.ones(4, 4)

    sim.run(2, fn)
