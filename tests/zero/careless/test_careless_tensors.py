"""What a careless user does with parameters and gradients themselves: converts, replaces, shares, copies them."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.blocks import RATE, STAGES, Blocks, build, check, data, one_step, twin
from torch import nn

from zoo import sim
from zoo.zero import PartitionedAccessError

# Conversions ---------------------------------------------------------------------------------------------------------

NO_CHANGE: dict[str, Callable[[nn.Module], Any]] = {
    "to_dtype": lambda model: model.to(torch.float64),
    "to_device": lambda model: model.to("cpu", torch.float64),
    "to_both": lambda model: model.to(torch.empty(0, dtype=torch.float64)),
    "double": lambda model: model.double(),
    "cpu": lambda model: model.cpu(),
    "type": lambda model: model.type(torch.float64),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
}


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", NO_CHANGE)
def test_a_conversion_to_what_the_model_is_already_changes_nothing(stage: int, way: str) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        for step in range(2):
            NO_CHANGE[way](model)
            model(data(rank, step)).square().mean().backward()
            NO_CHANGE[way](model)
            optimizer.step()
            optimizer.zero_grad()
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_data_of_a_reduced_gradient_is_the_gradient(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        model(data(rank)).square().mean().backward()
        gradient: Any = model.blocks[0].weight.grad  # type: ignore[index]
        gradient.data = gradient.data
        assert gradient.detach() is gradient
        for convert in (
            gradient.half,
            lambda: gradient.to(torch.float32),
            lambda: gradient.to(gradient.dtype, copy=True),
        ):
            with pytest.raises(PartitionedAccessError, match=r"gradient of 'blocks\.0\.weight', which is partitioned"):
                convert()
        with pytest.raises(PartitionedAccessError, match=r"gradient of 'blocks\.0\.weight', which is partitioned"):
            gradient.data = torch.zeros(6, 6, dtype=torch.float64)
        optimizer.step()
        check(optimizer, twin(2))

        optimizer.zero_grad()
        model(data(rank, 1)).square().mean().backward()
        for parameter in model.parameters():  # as in tutorials of long ago
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        optimizer.step()
        check(optimizer, twin(2))

    sim.run(2, fn)


# Parameters that were not there at construction ----------------------------------------------------------------------


def _replace(model: Any) -> None:
    model.blocks[1].weight = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))


def _add_module(model: Any) -> None:
    model.blocks.append(nn.Linear(6, 6).double())


def _replace_module(model: Any) -> None:
    model.blocks[1] = nn.Linear(6, 6).double()


def _add_frozen(model: Any) -> None:
    model.blocks[1].scale = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)


CHANGES = {
    _replace: "blocks.1.weight", _add_module: "blocks.3.weight", _replace_module: "blocks.1.weight",
    _add_frozen: "blocks.1.scale",
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_came_after_construction_are_refused(stage: int, change: Callable[[Any], None]) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        one_step(model, optimizer, rank)
        blocks, block, weight = model.blocks, model.blocks[1], model.blocks[1].weight  # type: ignore[index, union-attr]
        change(model)
        sentence = rf"'{CHANGES[change]}'.*after the ZeRO optimizer was constructed.*close\(\)"
        model(data(rank, 5)).square().mean().backward()
        for use in (optimizer.step, optimizer.state_dict, optimizer.consolidated_parameters, optimizer.step):
            with pytest.raises(ValueError, match=sentence):
                use()
        optimizer.zero_grad()
        model.blocks = nn.ModuleList([blocks[0], block, blocks[2]])  # type: ignore[index]
        block.weight = weight
        if hasattr(block, "scale"):
            del block.scale
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_that_is_taken_out_or_wrapped_goes_on(stage: int) -> None:
    def run(model: Any, train: Callable[[int], None]) -> None:
        train(0)
        model.blocks[1] = nn.Sequential(model.blocks[1], nn.Identity())
        model.blocks[2] = nn.Identity()
        train(1)

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        run(model, lambda step: one_step(model, optimizer, rank, step))
        check(optimizer, expected)

    plain = Blocks().double()
    reference = torch.optim.SGD(plain.parameters(), lr=RATE)

    def train(step: int) -> None:
        for rank in range(2):
            (plain(data(rank, step)).square().mean() / 2).backward()
        reference.step()
        reference.zero_grad()

    run(plain, train)
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    sim.run(2, fn)


# Memory that parameters share ----------------------------------------------------------------------------------------


def _same_data(model: Any) -> None:
    model.blocks[1].weight.data = model.blocks[0].weight.data


def _new_parameter(model: Any) -> None:
    model.blocks[1].weight = nn.Parameter(model.blocks[0].weight)


def _transposed(model: Any) -> None:
    model.blocks[1].weight.data = model.blocks[0].weight.data.T


def _row(model: Any) -> None:
    model.blocks[1].bias.data = model.blocks[0].weight.data[:, 2]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("share", [_same_data, _new_parameter, _transposed, _row])
def test_parameters_that_share_memory_are_refused(stage: int, share: Callable[[Any], None]) -> None:
    model: Any = Blocks().double()
    share(model)
    name = "bias" if share is _row else "weight"
    sentence = rf"'blocks\.0\.weight' and 'blocks\.1\.{name}' share memory.*same nn\.Parameter"
    with pytest.raises(ValueError, match=sentence):
        build(stage, model)
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_lie_in_one_storage_apart_from_each_other_train(stage: int) -> None:
    def make() -> nn.Module:
        model: Any = Blocks().double()
        columns = torch.randn(6, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        model.blocks[0].weight.data, model.blocks[1].weight.data = columns[:, ::2], columns[:, 1::2]
        model.blocks[2].weight = model.blocks[1].weight  # tied
        return model

    def fn(rank: int) -> None:
        model, optimizer = build(stage, make())
        for step in range(2):
            one_step(model, optimizer, rank, step)
        check(optimizer, twin(2, 2, make=make))

    sim.run(2, fn)


# The optimizer itself ------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copied_or_pickled_optimizer_is_refused(stage: int, way: Callable[[Any], Any]) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        one_step(model, optimizer, rank)
        with pytest.raises(ValueError, match=r"a ZeroOptimizer cannot be copied or pickled.*state_dict\(\)"):
            way(optimizer)
        with pytest.raises(ValueError, match=r"a ShardedModel cannot be copied or pickled.*state_dict\(\)"):
            way(optimizer.sharded)
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_whose_optimizer_is_gone_runs_and_says_what_was_missed(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        before = model(data(rank)).detach()
        del optimizer
        gc.collect()
        assert torch.equal(model(data(rank)), before)
        model(data(rank)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"does not exist any more.*close\(\)"):
            model.get_parameter("first.weight").data = torch.zeros(6, 4, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"is a ZeroParameter.*close\(\)"):
            build(stage, model)

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_closed_optimizer_makes_room_for_the_next_one(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        one_step(model, optimizer, rank)
        optimizer.close()
        model, optimizer = build(3 - stage, model)
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


# Parametrisations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("apply", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_a_parametrisation_after_construction_is_refused(stage: int, apply: Callable[[Any], Any]) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)

        def use() -> None:
            apply(model.get_submodule("blocks.1"))
            optimizer.step()

        with pytest.raises(ValueError, match=r"'blocks\.1\.weight.*before the optimizer is constructed|close\(\) the"):
            use()

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_that_is_given_other_memory_goes_on(stage: int) -> None:
    value = torch.arange(36, dtype=torch.float64).view(6, 6) / 36

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        with torch.no_grad():
            model.get_parameter("blocks.1.weight").set_(value.clone())
        for step in range(2):
            one_step(model, optimizer, rank, step)
        check(optimizer, twin(2, 2, make=make))

    def make() -> nn.Module:
        model = Blocks().double()
        model.get_parameter("blocks.1.weight").data = value.clone()
        return model

    sim.run(2, fn)


def test_a_parameter_of_a_parameter_is_refused() -> None:
    def fn(rank: int) -> None:
        model, _ = build(0)
        with pytest.raises(ValueError, match=r"nn\.Parameter\(\.\.\.\) of 'first\.weight'.*clone\(\)"):
            nn.Parameter(model.get_parameter("first.weight"))
        nn.Parameter(model.get_parameter("first.weight").detach().clone())

    sim.run(1, fn)


# Gradients that are whole --------------------------------------------------------------------------------------------


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv2d(1, 3, (2, 1)), nn.Linear(9, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.conv(x.view(-1, 1, 4, 1)).flatten(1))
        return out


def _halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data * 0.5  # type: ignore[union-attr]


def _channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "sync"), [(0, True), (0, False), (1, False), (2, False), (3, False)])
@pytest.mark.parametrize("change", [_halve, _channels_last])
def test_data_of_a_whole_gradient_is_what_is_stepped_with(stage: int, sync: bool, change: Callable[..., None]) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, Picture())
        with contextlib.nullcontext() if sync else optimizer.no_sync():
            model(data(rank)).square().mean().backward()
            change(model)
            gradient: Any = model.get_parameter("last.bias").grad
            assert type(copy.deepcopy(gradient)) is type(gradient + 0.0) is torch.Tensor
            with pytest.raises(ValueError, match=r"gradient of 'last\.bias'.*\(2,\).*\(3,\)"):
                gradient.data = torch.zeros(3, dtype=torch.float64)
        if not sync:
            model(data(rank, 1)).square().mean().backward()
        optimizer.step()
        check(optimizer, expected)

    plain = Picture().double()
    for rank in range(2):
        (plain(data(rank)).square().mean() / 2).backward()
    change(plain)
    for rank in () if sync else range(2):
        (plain(data(rank, 1)).square().mean() / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    sim.run(2, fn)


SWAPS: dict[str, Callable[[Any], None]] = {
    "one": lambda model: torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
        model.blocks[0].weight, nn.Parameter(torch.ones_like(model.blocks[0].weight))
    ),
    "the other": lambda model: torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
        nn.Parameter(torch.ones_like(model.blocks[0].weight)), model.blocks[0].weight
    ),
    "convert": lambda model: model.to(torch.float32),
    "convert nothing": lambda model: model.double(),
    "load": lambda model: model.load_state_dict({name: p + 1 for name, p in twin(2, 0).items()}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", SWAPS)
def test_swapped_tensors_are_refused_and_training_goes_on(stage: int, way: str) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        with pytest.raises((ValueError, RuntimeError)) as told:
            SWAPS[way](model)
        if (stage, way) == (3, "convert"):  # the values are not there
            assert "at ZeRO stage 3 only a shard of it is on this rank" in str(told.value)
        else:
            assert "torch.utils.swap_tensors was given" in f"{told.value} {told.value.__cause__}"
        for step in range(2):
            one_step(model, optimizer, rank, step)
        check(optimizer, twin(2, 2))

    torch.__future__.set_swap_module_params_on_conversion(way not in ("one", "the other"))
    try:
        sim.run(2, fn)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
