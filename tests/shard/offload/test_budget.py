"""The ranks of a node under one cap of host memory."""

from __future__ import annotations

import errno
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.shard.offload.test_offload import build, net, section, train
from torch import nn

from zoo import sim
from zoo.comm import CollectiveMismatchError, Communicator
from zoo.io import Handle
from zoo.shard import OffloadError
from zoo.shard.offload import budget
from zoo.zero import DryRun, Stage3Optimizer, ZeroConfig

BOUNCE = 2 << 20
"""What the handle of a rank with files may take besides: two blocks for its thread."""


def files_in_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("zoo-ledger-")}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = files_in_memory()
    yield
    assert files_in_memory() == before


def work(rank: int, folder: Path, cap: int | None = None, ranks_per_node: int | None = 2) -> tuple[Any, ...]:
    """Losses, need of this rank, its pool's and its node's counts."""
    model, optimizer = build(folder, offload_host_bytes=cap, ranks_per_node=ranks_per_node)
    losses = train(model, optimizer, range(3))
    scratch = optimizer.sharded.scratch
    need, ledger = optimizer.updater.buffer_bytes(), scratch._budget and scratch._budget.ledger
    return losses, need, scratch.pool.stats(), ledger


def refused(rank: int, *args: Any, **more: Any) -> str:
    with pytest.raises(OffloadError) as caught:
        work(rank, *args, **more)
    return str(caught.value)


def test_ranks_of_a_node_share_a_cap(tmp_path: Path) -> None:
    """What is enough for one rank is enough for two on two nodes, and not on one: there both learn what it needs."""
    expected, need, *_ = sim.run(2, partial(work, folder=tmp_path))[0]
    apart = sim.run(2, partial(work, folder=tmp_path, cap=need + BOUNCE, ranks_per_node=1))
    assert [losses for losses, *_ in apart] == [expected] * 2
    assert all(stats.reserved_bytes <= need and ledger is None for _, _, stats, ledger in apart)

    together = sim.run(2, partial(work, folder=tmp_path, cap=2 * (need + BOUNCE)))
    assert [losses for losses, *_ in together] == [expected] * 2
    # One account: both ranks read the same numbers, and never more than the cap.
    stats = {ledger.stats() for *_, ledger in together}
    assert len(stats) == 1
    assert need < stats.pop().peak_bytes <= 2 * need

    texts = sim.run(2, partial(refused, folder=tmp_path, cap=2 * (need + BOUNCE) - 1))
    assert texts[0] == texts[1]
    assert (
        f"allows {2 * (need + BOUNCE) - 1:,} bytes of host memory to the ranks of the group on node 0 (2), which need "
        in texts[0]
    )
    assert (
        f"need {2 * (need + BOUNCE):,} together: 0 are in use and the buffers of an update take {2 * need:,} more, "
        f"bounce buffers {2 * BOUNCE:,}." in texts[0]
    )
    # Nobody has said which ranks share a node.
    assert sim.run(2, partial(refused, folder=tmp_path, cap=2 * (need + BOUNCE) - 1, ranks_per_node=None)) == texts


def test_all_nodes_learn_that_one_has_too_little(tmp_path: Path) -> None:
    """The last of three ranks has a node for itself, and the share of one rank of two."""
    need = sim.run(3, partial(work, folder=tmp_path))[0][1]
    found = sim.run(3, partial(work, folder=tmp_path, cap=2 * (need + BOUNCE)))
    assert found[0][3] is not None
    assert found[2][3] is None
    texts = sim.run(3, partial(refused, folder=tmp_path, cap=2 * (need + BOUNCE) - 1))
    assert len(set(texts)) == 1


class Pair(nn.Module):
    """Two halves that are trained in different ways."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(width))
        self.second = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.first + self.second


def test_what_one_rank_does_not_need_another_has(tmp_path: Path) -> None:
    """Momentum for one half of each bucket: the rank with that half needs more than half of what both need."""

    def uneven(rank: int, cap: int | None = None, ranks_per_node: int = 2) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Pair(8192) for _ in range(8)))
        named = dict(model.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if n.endswith("first")], "momentum": 0.9},
            {"params": [p for n, p in named.items() if n.endswith("second")]},
        ]
        optimizer = Stage3Optimizer(
            model, optimizer=torch.optim.SGD, lr=0.01, params=groups, offload_optimizer=section("nvme", tmp_path),
            param_persistence_threshold=0, reduce_bucket_size=1, units=[Pair], offload_host_bytes=cap,
            ranks_per_node=ranks_per_node,
        )  # fmt: skip
        losses = []
        for step in range(3):
            x = torch.randn(8192, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, optimizer.updater.buffer_bytes()

    free = sim.run(2, uneven)
    needs = [need for _, need in free]
    assert needs[0] > 1.5 * needs[1]
    assert sim.run(2, partial(uneven, cap=sum(needs) + 2 * BOUNCE)) == free
    # As many bytes in two equal parts are not enough.
    with pytest.raises(sim.RankError) as caught:
        sim.run(2, partial(uneven, cap=sum(needs) // 2 + BOUNCE, ranks_per_node=1))
    assert isinstance(caught.value.__cause__, OffloadError)


def test_a_group_of_some_of_a_nodes_ranks_has_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert build(tmp_path, offload_host_bytes=16 << 20)[1].sharded.scratch.pool.stats().capacity_bytes == 2 << 20
    with pytest.raises(
        ValueError,
        match="offload_host_bytes=8,192 is 2,048 bytes for the 1 ranks of the group on node 0; each of them needs a "
        "page of 4,096 at least and 2,097,152 for its bounce buffers",
    ):
        build(tmp_path, offload_host_bytes=8192)


def test_handles_that_need_different_bounce_buffers_are_told_on_every_rank(tmp_path: Path) -> None:
    """Of two handles of the user's one needs more than the cap: no rank goes on to wait for the other."""

    def fn(rank: int) -> str:
        with (
            Handle(block_size=(1 << 20) << 4 * rank, bounce_bytes=0) as handle,
            pytest.raises(CollectiveMismatchError) as caught,
        ):
            build(tmp_path, handle, offload_host_bytes=16 << 20, ranks_per_node=2)
        return str(caught.value)

    for text in sim.run(2, fn):
        assert "of which 2097152 for bounce" in text
        assert "of which 33554432 for bounce" in text


def test_ranks_that_cannot_share_a_file_all_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def full(**_: Any) -> str:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(tempfile, "mkdtemp", full)
        texts = sim.run(4, partial(refused, folder=tmp_path, cap=8 << 20))
    assert len(set(texts)) == 1
    assert "rank 0: [Errno 28] No space left on device. Ranks are taken to be on the nodes [0, 0, 1, 1]" in texts[0]

    with monkeypatch.context() as patch:
        machines = iter("aaab")  # the makers of two files, then those that join them
        patch.setattr(budget, "_machine", lambda: next(machines, "a"))
        texts = sim.run(4, partial(refused, folder=tmp_path, cap=8 << 20))
    assert len(set(texts)) == 1
    assert "it is on another machine than rank " in texts[0]

    with monkeypatch.context() as patch:
        join = budget.HostBudget._join

        def elsewhere(self: Any, heard: str) -> Any:
            return join(self, heard + "/not here" * (self._comm.rank == 3))

        patch.setattr(budget.HostBudget, "_join", elsewhere)
        texts = sim.run(4, partial(refused, folder=tmp_path, cap=8 << 20))
    assert len(set(texts)) == 1
    assert "rank 3: make the ledger" in texts[0]


def test_a_plan_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def untouched(*_: Any, **__: Any) -> None:
        raise AssertionError("a DryRun has no budget")

    monkeypatch.setattr(budget.HostBudget, "__init__", untouched)
    optimizer = Stage3Optimizer(
        net().to("meta"), offload_optimizer=section("nvme", tmp_path), group=DryRun(4), offload_host_bytes=4096,
        ranks_per_node=2,
    )  # fmt: skip
    assert optimizer.forecast().buffers_bytes > 4096


@pytest.mark.parametrize(
    ("cap", "region"),
    [(80 << 20, 4 << 20), (1_100_000, 16 * 4096), (4 * 4096, 4096), (10 << 30, 64 << 20)],
)
def test_what_a_rank_takes_at_a_time_is_whole_pages(cap: int, region: int) -> None:
    """Huge ones where they fit; with one of each of the two ranks an eighth of the cap, if that is a page."""

    def fn(rank: int) -> int:
        config = ZeroConfig(offload_host_bytes=cap, ranks_per_node=2)
        return budget.HostBudget(Communicator(nodes=2), config, torch.device("cpu")).region_bytes

    assert sim.run(2, fn) == [region] * 2


def test_all_that_a_rank_takes_on_the_host_is_under_its_cap(tmp_path: Path) -> None:
    """Bounce buffers are not the pool's, and are left room for; without files there are none."""
    (_, need, _, _), *_ = sim.run(1, partial(work, folder=tmp_path))
    cap = need + BOUNCE

    def fn(rank: int) -> tuple[int, int]:
        model, optimizer = build(tmp_path, offload_host_bytes=cap)
        train(model, optimizer, range(2))
        scratch = optimizer.sharded.scratch
        return scratch.handle.most_bounce_bytes, scratch.pool.stats().capacity_bytes

    ((bounce, capacity),) = sim.run(1, fn)
    assert bounce + capacity == cap

    def on_host(rank: int) -> int:
        optimizer = Stage3Optimizer(net(), offload_optimizer=section("cpu", tmp_path), offload_host_bytes=cap)
        capacity: int = optimizer.sharded.scratch.pool.stats().capacity_bytes
        return capacity

    assert sim.run(1, on_host) == [cap]
