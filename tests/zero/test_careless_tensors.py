"""What a careless user does with parameters and gradients themselves: converts, replaces, shares, copies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.zero import PartitionedAccessError

from .test_careless import STAGES, Blocks, build, check, data, one_step, twin

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
        for convert in (gradient.half, lambda: gradient.to(torch.float32), lambda: gradient.to(gradient.dtype, copy=True)):
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
