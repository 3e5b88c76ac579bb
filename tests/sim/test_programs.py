"""Torch's own programs on simulated ranks, and autograd hooks that communicate."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from zoo import sim

STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def alone(world: int) -> list[torch.Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(net(batch(rank, step)).square().mean() for rank in range(world)).div(world).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def train(net: nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(rank, step)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("hook", [False, True])
def test_ddp(seed, hook):
    def average(state, bucket):  # DDP compares annotations by identity, so none here
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def fn(rank: int):
        net = nn.parallel.DistributedDataParallel(model())
        if hook:
            net.register_comm_hook(None, average)
        train(net, rank)
        return [parameter.detach().clone() for parameter in net.parameters()]

    for result in sim.run(3, fn, seed=seed):
        torch.testing.assert_close(result, alone(3))


@pytest.mark.parametrize("seed", [0, 1])
def test_fully_shard(seed):
    fsdp = pytest.importorskip("torch.distributed.fsdp")

    def fn(rank: int):
        net = model()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (net[0], net[2], net):
            fsdp.fully_shard(layer, mesh=mesh)
        train(net, rank)
        return [parameter.full_tensor().detach() for parameter in net.parameters()]

    for result in sim.run(3, fn, seed=seed):
        torch.testing.assert_close(result, alone(3))


def test_hooks_that_communicate_inside_backward():
    def fn(rank: int):
        net = model()
        works, order = [], []

        def finish() -> None:
            order.append(len(works))
            for work in works:
                work.wait()

        def reduce(parameter: torch.Tensor) -> None:
            if not works:
                Variable._execution_engine.queue_callback(finish)
            parameter.grad.div_(dist.get_world_size())
            works.append(dist.all_reduce(parameter.grad, async_op=True))

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(STEPS):
            works.clear()
            optimizer.zero_grad()
            net(batch(rank, step)).square().mean().backward()
            optimizer.step()
        assert order == [4] * STEPS
        return [parameter.detach() for parameter in net.parameters()]

    for seed in range(3):
        for result in sim.run(4, fn, seed=seed):
            torch.testing.assert_close(result, alone(4))


def test_an_error_inside_backward_stops_all_ranks():
    def fn(rank: int):
        tensor = torch.ones(2, requires_grad=True)

        def hook(grad: torch.Tensor) -> torch.Tensor:
            if rank == 1:
                raise KeyError("in a hook")
            dist.all_reduce(grad)
            return grad

        tensor.register_hook(hook)
        tensor.sum().backward()

    with pytest.raises(sim.RankError, match="rank 1 raised KeyError"):
        sim.run(3, fn)


def test_one_rank_is_enough():
    assert sim.run(1, lambda rank: (dist.get_world_size(), dist.get_backend())) == [(1, "zoo_sim")]
