"""What is computed between the actions of a runtime: to the integer, by unit, forward and backward."""

from __future__ import annotations

import torch
from torch import nn

from zoo import sim
from zoo.plan import Actions, Kind
from zoo.profiling import FlopsProfiler, WorkCounter
from zoo.zero import ZeroOptimizer

ROWS, WIDTH = 3, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def test_the_flops_of_each_unit_are_those_of_its_products() -> None:
    """2 m k n a product: one in forward; in backward one for the weight and, but of the first, one for the input."""

    def fn(rank: int) -> tuple[Actions, dict[str, int]]:
        model = Net()
        optimizer = ZeroOptimizer(
            model, stage=3, optimizer=torch.optim.SGD, lr=0.1, units=[nn.Linear], param_persistence_threshold=0,
            reduce_bucket_size=1,
        )  # fmt: skip
        with WorkCounter() as work, optimizer.sharded.record(work) as actions:
            model(torch.ones(ROWS, 4)).sum().backward()
            optimizer.step()
        return actions, work.not_counted

    first, second = 2 * ROWS * 4 * WIDTH, 2 * ROWS * WIDTH * 2
    for actions, not_counted in sim.run(2, fn):
        found: dict[tuple[str, str], int] = {}
        for action in actions.of_kind(Kind.COMPUTE):
            key = action.moment.value, action.unit
            found[key] = found.get(key, 0) + action.flops
        assert {key: flops for key, flops in found.items() if flops} == {
            ("forward", "first"): first, ("forward", "second"): second,
            ("backward", "second"): 2 * second, ("backward", "first"): first,
        }  # fmt: skip
        assert actions.flops == 2 * first + 3 * second
        assert f"{2 * second:,} FLOPs" in str(actions)
        assert not not_counted


def test_all_of_it_is_what_a_profiler_counts() -> None:
    model = Net()
    optimizer = ZeroOptimizer(model, stage=1, optimizer=torch.optim.SGD, lr=0.1)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(ROWS, 4)).sum().backward()
    profiler.end_profile()
    profile = profiler.profile.model
    optimizer.zero_grad()
    with WorkCounter() as work, optimizer.sharded.record(work) as actions:
        model(torch.ones(ROWS, 4)).sum().backward()
    assert actions.flops == profile.forward.flops + profile.backward.flops


def test_without_a_counter_nothing_is_computed() -> None:
    model = Net()
    optimizer = ZeroOptimizer(model, stage=3, lr=0.1, param_persistence_threshold=0)
    with optimizer.sharded.record() as actions:
        model(torch.ones(ROWS, 4)).sum().backward()
    assert not actions.of_kind(Kind.COMPUTE)
    assert actions.flops == 0
