"""The communication hook of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zoo import registry, sim
from zoo.comm import Communicator
from zoo.comm.compression import HookState, OneBit, TopK, hook
from zoo.comm.compression.hook import _finite

Tensor = torch.Tensor


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 20))


def train(rank: int, state_of: Any, steps: int, bad: int = -1) -> tuple[list[float], list[Tensor], Any]:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.01)
    state = state_of()
    if state is not None:
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        (loss * (float("inf") if step == bad and rank == 0 else 1.0)).backward()
        if all(bool(torch.isfinite(p.grad).all()) for p in model.parameters()):
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [p.detach().clone() for p in model.parameters()], state


def test_before_it_begins_nothing_is_compressed() -> None:
    plain = sim.run(2, lambda rank: train(rank, lambda: None, 4))
    early = sim.run(2, lambda rank: train(rank, lambda: HookState(OneBit(), start_step=10), 4))
    for (losses, values, _), (others, theirs, state) in zip(plain, early, strict=True):
        assert losses == pytest.approx(others, rel=1e-5)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(values, theirs, strict=True))
        assert not state.reducers


@pytest.mark.matrix
@pytest.mark.parametrize("compressor", ["onebit", "blockwise", "top_k", "power_sgd"])
def test_it_trains_and_ranks_stay_equal(compressor: str) -> None:
    def state() -> HookState:
        return HookState(registry.get("compressor", compressor)(), start_step=3)

    found = sim.run(2, lambda rank: train(rank, state, 40))
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert found[0][2].reducers
    assert found[0][0][-1] < 0.3 * found[0][0][0]


def test_a_gradient_that_is_not_finite_leaves_the_errors_alone() -> None:
    clean = sim.run(2, lambda rank: train(rank, lambda: HookState(OneBit()), 6, bad=4))
    for _, values, state in clean:
        assert all(bool(torch.isfinite(v).all()) for v in values)
        assert all(
            bool(torch.isfinite(r.worker.value).all()) for r in state.reducers.values() if r.worker.value is not None
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_seen(bad: float) -> None:
    for place in (0, 17, 63, 99):
        x = torch.zeros(100)
        x[place] = bad
        assert not _finite(x)
    assert _finite(torch.full((100,), 3e38))


def test_within_nodes_it_is_exact() -> None:
    def state(nodes: Any) -> HookState:
        return HookState(TopK(TopK.Config(ratio=0.05)), comm=Communicator(nodes=nodes), between_nodes=True)

    plain = sim.run(2, lambda rank: train(rank, lambda: None, 4))
    one_node = sim.run(2, lambda rank: train(rank, lambda: state(2), 4))
    assert all(bool((torch.isfinite(v)).all()) for v in one_node[0][1])
    # All ranks on one node: what is compressed "between nodes" is a mean over one rank with all of its error kept.
    assert plain[0][0][0] == pytest.approx(one_node[0][0][0])


def test_a_start_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="start_step=-1; it must be 0 or more"):
        HookState(OneBit(), start_step=-1)


def test_gradients_of_64_bits_are_compressed_as_those_of_32() -> None:
    def fn(rank: int) -> list[Tensor]:
        model = DistributedDataParallel(net().double())
        model.register_comm_hook(HookState(OneBit()), hook)
        x = torch.randn(8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        model(x).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    first, second = sim.run(2, fn)
    assert len(first) == 4
    assert all(torch.equal(a, b) and a.dtype is torch.float64 for a, b in zip(first, second, strict=True))
