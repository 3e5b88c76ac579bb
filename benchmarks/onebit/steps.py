"""A step of a small model under DistributedDataParallel, with communication hooks of torch's and of zoo's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zoo.comm.compression import HookState, OneBit, PowerSGD, hook

LAYERS, WIDTH, ROWS = 4, 1024, 32
PLAIN = "no hook, fp32"
Step = Callable[[], None]


def torch_power_sgd(model: DistributedDataParallel) -> None:
    """torch's hook of rank 4; it wants two steps without compression first."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    state = power.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)


def with_hook(compressor: Any) -> Callable[[DistributedDataParallel], None]:
    """zoo's hook."""
    return lambda model: model.register_comm_hook(HookState(compressor), hook)


CONTENDERS: dict[str, Callable[[DistributedDataParallel], None]] = {
    PLAIN: lambda model: None,
    "torch's PowerSGD hook, rank 4": torch_power_sgd,
    "zoo's hook, PowerSGD of rank 4": with_hook(PowerSGD(PowerSGD.Config(columns=WIDTH))),
    "zoo's hook, 1 bit": with_hook(OneBit()),
}


def step_of(register: Callable[[DistributedDataParallel], None], width: int) -> Step:
    """Forward, backward with the reduction, and SGD with momentum, on a batch of ``ROWS`` rows."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.Tanh())]
    # One bucket: with several, torch's hook begins its later collectives from callbacks, whose order is not the same on
    # all ranks, and gloo takes one for another.
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=10**6)
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()

    return step


def contenders(width: int) -> dict[str, Step]:
    """Each with a model of its own."""
    return {name: step_of(register, width) for name, register in CONTENDERS.items()}
