"""What comes and goes in every step takes no more memory than it needs where a step has its peak."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.shard import memory
from zoo.shard.memory import IDLE_BYTES, StepMemory, lends
from zoo.zero import ZeroOptimizer

MB = 1 << 20


class Tied(nn.Module):
    """A table that the model has itself, around layers of 64 * 64."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(512, 64) / 8)
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(4)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table[tokens]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden @ self.table.t()


def test_what_is_gathered_ahead_and_kept_follows_the_layers_and_not_what_is_around_them() -> None:
    def sizes(rank: int) -> tuple[dict[str, int], dict[str, int]]:
        def model(module: nn.Module) -> dict[str, int]:
            made = ZeroOptimizer(
                module, stage=3, param_persistence_threshold=0, reduce_bucket_size=0, units=[nn.Linear, Tied]
            )
            return made.sharded.obeyed

        flat = nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Linear(2048, 1024, bias=False))
        return model(Tied()), model(flat)

    tied, flat = sim.run(2, sizes)[0]
    assert tied == {"prefetch_bucket_size": 64 * 64, "max_live_parameters": 2**22}
    assert flat == {"prefetch_bucket_size": 2**22, "max_live_parameters": 2**23}


@pytest.mark.skipif(not lends(), reason="needs zoo-kernels")
@pytest.mark.parametrize("first", [MB, 7 * MB, memory.REGION_BYTES - 8, memory.REGION_BYTES, memory.REGION_BYTES + 8])
def test_the_first_buffer_may_be_of_any_size(first: int) -> None:
    step = StepMemory()
    sizes = first, first // 2, first // 2, memory.REGION_BYTES
    made = [step.empty(size, torch.uint8, torch.device("cpu")) for size in sizes]
    assert [one.numel() for one in made] == list(sizes)
    reserved = sum(pool.stats().reserved_bytes for pool in step._pools.values())
    assert reserved <= sum(sizes) + 2 * memory.REGION_BYTES
    step.empty(memory.POOLED_BYTES + 8, torch.uint8, torch.device("cpu"))
    assert reserved == sum(pool.stats().reserved_bytes for pool in step._pools.values())


@pytest.mark.skipif(not lends(), reason="needs zoo-kernels")
def test_a_pool_gives_back_what_lies_idle_if_it_is_much() -> None:
    step = StepMemory()
    held = step.empty(MB, torch.uint8, torch.device("cpu"))

    def idle_bytes() -> int:
        stats = [pool.stats() for pool in step._pools.values()]
        return sum(s.reserved_bytes - s.in_use_bytes for s in stats)

    many = [step.empty(IDLE_BYTES // 4, torch.uint8, torch.device("cpu")) for _ in range(2)]
    del many
    step.give_back()
    assert IDLE_BYTES // 2 <= idle_bytes() <= IDLE_BYTES
    many = [step.empty(IDLE_BYTES // 2, torch.uint8, torch.device("cpu")) for _ in range(2)]
    del many
    step.give_back()
    assert idle_bytes() <= memory.REGION_BYTES
    assert held.fill_(1).sum() == MB


@pytest.mark.skipif(not lends(), reason="needs zoo-kernels")
def test_the_memory_of_reduced_gradients_is_given_back_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "IDLE_BYTES", 0)

    def reserved(rank: int) -> list[int]:
        model = nn.Sequential(nn.Linear(2100, 2100, bias=False), nn.Tanh())
        optimizer = ZeroOptimizer(model, stage=2, optimizer=torch.optim.SGD, lr=0.1)
        step: Any = optimizer.buckets[0].memory
        found = []
        for _ in range(2):
            model(torch.randn(1, 2100) + rank).sum().backward()
            optimizer.step()
            found.append(sum(pool.stats().reserved_bytes for pool in step._pools.values()))
            optimizer.zero_grad()
            found.append(sum(pool.stats().reserved_bytes for pool in step._pools.values()))
        return found

    for found in sim.run(2, reserved):
        assert found[0] >= 2100**2 * 4 // 2
        assert found == [found[0], 0, found[0], 0]


@pytest.mark.skipif(not lends(), reason="needs zoo-kernels")
@pytest.mark.parametrize("stage", [2, 3])
def test_large_gradients_lie_in_the_memory_that_the_ranks_share(stage: int) -> None:
    def trained(rank: int) -> tuple[list[torch.Tensor], list[bool]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1500, 1500, bias=False), nn.Tanh(), nn.Linear(1500, 100, bias=False))
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=0.1, reduce_bucket_size=0, units=[nn.Linear],
            param_persistence_threshold=0,
        )  # fmt: skip
        first: Any = optimizer.buckets[0]
        segment = getattr(first.shard_group._transport, "_segment", None)
        shared = []

        def look(*_: Any) -> None:
            shared.append(segment is not None and segment.room_of(first.gradients.flat) is not None)

        model[0].weight.register_hook(look)
        for _ in range(2):
            model(torch.linspace(-1, 1, 3000).view(2, 1500) * (1 + rank)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.gathered():
            return [p.detach().clone() for p in model.parameters()], shared

    plain, through = sim.run(2, trained, transport="pairwise"), sim.run(2, trained, transport="shared")
    for (one, no), (other, yes) in zip(plain, through, strict=True):
        assert all(map(torch.equal, one, other))
        assert (no, yes) == ([False] * 2, [True] * 2)


def test_a_large_buffer_needs_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "lends", lambda: False)
    monkeypatch.setitem(sys.modules, "zoo.kernels.storage", None)
    size = memory.POOLED_BYTES + 8
    assert memory.StepMemory().empty(size, torch.uint8, torch.device("cpu")).numel() == size


def test_a_table_that_is_used_twice_opens_its_gradient_when_the_sum_of_both_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = torch.arange(12) * 7

    def trained(rank: int, late: bool) -> tuple[list[torch.Tensor], list[int]]:
        monkeypatch.setattr(memory, "POOLED_BYTES", 0 if late else 1 << 40)
        torch.manual_seed(0)
        model, found = Tied(), list[int]()
        optimizer = ZeroOptimizer(
            model, stage=3, optimizer=torch.optim.SGD, lr=0.1, param_persistence_threshold=0, units=[nn.Linear, Tied],
            clip_norm=1.0,
        )  # fmt: skip
        table = optimizer.buckets[0].gradients
        assert table is not None
        model.layers[0].register_full_backward_hook(lambda *_: found.append(table.memory_bytes()))
        for step in range(3):
            with optimizer.no_sync() if step == 1 else contextlib.nullcontext():
                model(tokens + rank).square().sum().backward()
            if step != 1:
                optimizer.step()
                optimizer.zero_grad()
        with optimizer.gathered():
            result = [p.detach().clone() for p in model.parameters()]
        optimizer.close()
        assert not model.table._backward_hooks
        return result, found

    early = sim.run(2, lambda rank: trained(rank, False))
    late = sim.run(2, lambda rank: trained(rank, True))
    for (one, whole), (other, none) in zip(early, late, strict=True):
        assert all(map(torch.equal, one, other))
        assert whole[:2] == [512 * 64 * 4] * 2
        assert none[:2] == [0, 0]
