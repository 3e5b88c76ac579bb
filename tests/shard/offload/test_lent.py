"""Page-locked memory of a pool that was lent to a copy goes to nobody else before the copy is made; without a GPU."""

from __future__ import annotations

import pytest
import torch

from zoo.io import BufferPool, Handle
from zoo.shard.offload.scratch import Scratch
from zoo.shard.offload.tiers import Tier
from zoo.shard.roles import RoleBuffer

MADE: list[Event] = []


class Event:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self) -> None:
        self.stream: object = None
        self.passed = False
        MADE.append(self)

    def record(self, stream: object) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    MADE.clear()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")


def taken(pool: BufferPool, address: int) -> bool:
    """Whether the pool gives memory at this address to somebody now."""
    return any(pool.empty(1024).data_ptr() == address for _ in [0])


def test_a_shard_in_host_memory_stays_until_the_device_has_it() -> None:
    scratch, gpu = Scratch(Handle(), owned=True), torch.device("cuda:0")
    shard = RoleBuffer(1024, torch.float32, gpu, tier=Tier.HOST, scratch=scratch)
    shard.set(torch.arange(1024.0))
    assert shard.values is not None
    address = shard.values.data_ptr()
    shard.copying()  # what a gather does behind its copy
    shard.set(torch.zeros(1024))  # an update, or a checkpoint that is loaded
    assert MADE[0].stream == "current of cuda:0"
    assert not taken(scratch.pool, address)
    MADE[0].passed = True
    assert taken(scratch.pool, address)
    scratch.close()


def test_a_shard_that_is_in_no_pool_records_nothing() -> None:
    shard = RoleBuffer(8, torch.float32, torch.device("cuda:0"), tier=Tier.HOST)
    shard.values = torch.zeros(8)
    shard.copying()
    here = RoleBuffer(8, torch.float32, torch.device("cpu"), tier=Tier.HOST, scratch=Scratch(Handle(), owned=True))
    here.set(torch.zeros(8))
    here.copying()
    assert not MADE
