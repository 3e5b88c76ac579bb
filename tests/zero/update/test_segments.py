"""On the CPU the wrapped optimizer gets segments that fit a cache; nothing but the time of an update depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zero.blocks import STAGES, Blocks, build, one_step
from torch import nn

from zoo import sim
from zoo.shard.roles import RoleBuffer
from zoo.zero import ZeroOptimizer
from zoo.zero.update import segments

ADAMW = {"optimizer": torch.optim.AdamW, "reduce_bucket_size": 10**6}


@contextmanager
def cut(num_bytes: int) -> Iterator[None]:
    before, segments.CACHED_BYTES = segments.CACHED_BYTES, num_bytes
    try:
        yield
    finally:
        segments.CACHED_BYTES = before


def trained(
    stage: int, num_bytes: int, states: list[dict[str, Any]] | None = None, *, steps: int = 2, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], int]:
    """States of two ranks, what they have trained from the given ones, and the length of the longest segment."""

    def fn(rank: int) -> Any:
        model, optimizer = build(stage, **{**ADAMW, **options})
        if states is not None:
            optimizer.load_state_dict(states[rank])
        for step in range(steps):
            one_step(model, optimizer, rank, step)
        longest = max(s.tensor.numel() for s in optimizer.updater.segments)
        return optimizer.state_dict(), optimizer.consolidated_parameters(), longest

    with cut(num_bytes):
        found = sim.run(2, fn)
    return [state for state, _, _ in found], found[0][1], found[0][2]


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", [{}, {"loss_scale": 8.0, "clip_norm": 0.1}], ids=["plain", "scaled"])
def test_cuts_change_neither_weights_nor_states(stage: int, options: dict[str, Any]) -> None:
    """A state goes from any cut to any other, and training goes on with the same bits."""
    whole, _, longest = trained(stage, 1 << 20, **options)
    fine, _, most = trained(stage, 80, **options)
    assert most == 10 < longest
    for ours, theirs in zip(fine, whole, strict=True):
        same(ours["slices"], theirs["slices"])
        assert ours["scalars"] == theirs["scalars"]
    _, expected, _ = trained(stage, 1 << 20, whole, **options)
    for states, num_bytes in ((fine, 56), (fine, 1 << 20), (whole, 80)):
        same(trained(stage, num_bytes, states, **options)[1], expected)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_whose_neighbours_are_apart_is_read(stage: int) -> None:
    """As one that was saved segment by segment; one that lacks a neighbour is refused."""
    states, expected, _ = trained(stage, 80)
    apart = []
    for state in states:
        slices: dict[str, torch.Tensor] = {}
        for key, value in state["slices"].items():
            entry, start = key.rsplit("|", 1)
            slices |= {f"{entry}|{int(start) + at}": value[at : at + 7] for at in range(0, len(value), 7)}
        assert len(slices) > len(state["slices"])
        apart.append({**state, "slices": slices})
    same(trained(stage, 1 << 20, apart, steps=0)[1], expected)
    apart[1]["slices"].popitem()
    with pytest.raises(sim.RankError, match=r"Nothing was loaded"):
        trained(stage, 1 << 20, apart, steps=0)


def lengths(model: nn.Module, **options: Any) -> list[int]:
    return [s.tensor.numel() for s in ZeroOptimizer(model, stage=1, **options).updater.segments]


def test_what_is_cut() -> None:
    """fp32 masters count with their own size; groups are apart; an optimizer that makes one pass needs no cuts."""
    most = segments.CACHED_BYTES // 4

    def make(dtype: torch.dtype = torch.float32) -> nn.Module:
        return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).to(dtype)

    whole = lengths(make(), optimizer=torch.optim.AdamW, fused=True)
    model = make()
    assert whole == lengths(model, optimizer=torch.optim.AdamW, params=[{"params": model.parameters(), "fused": True}])
    assert max(whole) > most
    for dtype in (torch.float32, torch.bfloat16):
        found = lengths(make(dtype), optimizer=torch.optim.AdamW)
        assert sum(found) == sum(whole)
        assert max(found) == most


def test_parameters_on_nvme_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters in host memory of 16-bit parameters on NVMe are made from one read of each shard."""
    reads: list[RoleBuffer] = []
    read = RoleBuffer.read

    def counted(shard: RoleBuffer, *part: int) -> torch.Tensor:
        reads.append(shard)
        return read(shard, *part)

    monkeypatch.setattr(RoleBuffer, "read", counted)
    with cut(64):
        optimizer = ZeroOptimizer(
            Blocks().bfloat16(), stage=3, optimizer=torch.optim.AdamW, param_persistence_threshold=0,
            offload_param={"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0},
            offload_optimizer={"device": "cpu"}, reduce_bucket_size=1,
        )  # fmt: skip
    assert len(optimizer.updater.segments) > len(optimizer.buckets) == len(reads)
    optimizer.close()


def test_a_state_with_an_entry_of_nobody_is_refused() -> None:
    """Also where neighbours are apart."""
    _, optimizer = build(1, **ADAMW)
    one_step(optimizer.model, optimizer, 0)
    state = optimizer.state_dict()
    key, value = next((k, v) for k, v in state["slices"].items() if len(v) > 3)
    entry, start = key.rsplit("|", 1)
    apart = {k: v for k, v in state["slices"].items() if k != key}
    apart |= {key: value[:3], f"{entry}|{int(start) + 3}": value[3:]}
    optimizer.load_state_dict({**state, "slices": apart})
    for foreign in (f"{key}x", f"{entry}|07"):
        with pytest.raises(ValueError, match="Nothing was loaded"):
            optimizer.load_state_dict({**state, "slices": {**apart, foreign: torch.zeros(2)}})
