"""New parameters reach every rank, and only so much of them is under way at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.shard.runtime import executor
from zoo.zero import ZeroOptimizer


def trained(rank: int) -> tuple[list[torch.Tensor], int, int]:
    """Parameters after two steps; the most bytes that were under way; bytes of the largest shard."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    optimizer = ZeroOptimizer(model, stage=1, optimizer=torch.optim.AdamW, units=[nn.Linear], reduce_bucket_size=1)
    now = most = 0

    def watch(bucket: Any) -> None:
        begin = bucket.parameters.publish
        size = bucket.num_bytes // 2

        def publish() -> Any:
            nonlocal now, most
            handle = begin()
            now += size
            most = max(most, now)

            def wait() -> None:
                nonlocal now
                now -= size
                handle.wait()

            return SimpleNamespace(wait=wait)

        bucket.parameters.publish = publish

    for bucket in optimizer.sharded.buckets:
        watch(bucket)
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert now == 0
    return [p.detach().clone() for p in model.parameters()], most, optimizer.sharded.buckets[0].num_bytes // 2


@pytest.mark.parametrize("transport", ["native", "shared"])
def test_so_much_is_under_way_and_the_values_are_the_same(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = sim.run(2, trained, transport=transport)
    for limit in (1, 2, 3):
        _, most, shard = everything[0]
        assert most == 6 * shard  # all of it fits below four megabytes
        monkeypatch.setattr(executor, "BYTES_UNDER_WAY", limit * shard + 1)
        for found, whole in zip(sim.run(2, trained, transport=transport), everything, strict=True):
            assert found[1] == limit * shard
            assert all(map(torch.equal, found[0], whole[0]))


def test_a_shard_beyond_the_limit_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "BYTES_UNDER_WAY", 0)
    for _, most, shard in sim.run(2, trained):
        assert most == shard
