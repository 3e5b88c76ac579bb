"""States on NVMe are saved from where they lie, while training goes on: no copy, and no update overtakes the save."""

from __future__ import annotations

import errno
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpointing.model_disk import ModelDisk
from tests.checkpointing.test_background import ROOT, Slow
from tests.shard.offload.test_offload import build, section, train

from zoo.checkpointing import BackgroundSaver, CheckpointError, load, save
from zoo.checkpointing.comparing import compare
from zoo.comm import Communicator
from zoo.zero import Precision, ZeroOptimizer, safe_get_full_fp32_param, safe_set_full_fp32_param

Pair = tuple[torch.nn.Sequential, ZeroOptimizer]


def edit(model: torch.nn.Sequential, optimizer: ZeroOptimizer) -> None:
    weight: Any = model[0].weight
    safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) + 1.0)


CHANGES = {
    "step": lambda model, optimizer: train(model, optimizer, range(5, 6)),
    "edit": edit,
    "load": lambda model, optimizer: optimizer.load_state(_ones, {}),
    "close": lambda model, optimizer: optimizer.close(),
}


def _ones(name: str, role: str, start: Any, length: int) -> torch.Tensor:
    if role != "parameter":
        raise KeyError(role)
    return torch.ones(length)


def save_of(saver: BackgroundSaver, optimizer: ZeroOptimizer, tag: str, **more: Any) -> None:
    saver.save(more.pop("root", ROOT), tag, optimizer.state_slices(), optimizer.state_scalars(), **more)


@pytest.mark.parametrize("change", CHANGES)
def test_whoever_writes_waits_for_the_checkpoint(tmp_path: Path, change: str) -> None:
    model, optimizer = build(tmp_path)
    train(model, optimizer, range(2))
    disk, saver, expected = Slow(), BackgroundSaver(Communicator()), ModelDisk()
    save(ROOT, "one", optimizer.state_slices(), optimizer.state_scalars(), disk=expected)
    pool = optimizer.sharded.scratch.pool
    save_of(saver, optimizer, "one", disk=disk)
    assert saver.pending
    assert saver._snapshot.num_bytes == pool.stats().in_use_bytes == 0
    threading.Timer(0.2, disk.go.set).start()
    CHANGES[change](model, optimizer)
    assert disk.go.is_set(), "it did not wait"
    saver.wait()
    with load(ROOT, disk=disk) as found, load(ROOT, disk=expected) as same:
        assert list(compare(same, found)) == []
    saver.close()
    optimizer.close()


def test_reading_does_not_wait(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path)
    before = train(model, optimizer, range(1))
    disk, saver = Slow(), BackgroundSaver(Communicator())
    save_of(saver, optimizer, "one", disk=disk)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert float(model(x).square().mean()) < before[0]
    assert {s.role for s in optimizer.state_slices() if s.tensor.numel()} >= {"parameter", "exp_avg"}
    assert saver.pending
    assert not disk.go.is_set()
    disk.go.set()
    saver.close()
    optimizer.close()


def test_a_save_that_fails_lets_the_update_go_on(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path)
    train(model, optimizer, range(1))
    saver = BackgroundSaver(Communicator())
    for fails_at in (1, 6):
        disk = ModelDisk(fail_at=(fails_at, errno.ENOSPC))
        save_of(saver, optimizer, "one", disk=disk)
        assert len(train(model, optimizer, range(1, 2))) == 1
        with pytest.raises(CheckpointError, match="No space left"):
            saver.wait()
    saver.close()
    optimizer.close()


@given(
    steps=st.lists(st.booleans(), min_size=1, max_size=5), parameters=st.sampled_from(["none", "cpu", "nvme"]),
    low=st.booleans(), sub_group=st.sampled_from([500, 1100, 10**6]), ratio=st.sampled_from([1.0, 0.5]),
)  # fmt: skip
def test_checkpoints_of_any_steps_are_those_of_a_run_that_waits(
    steps: list[bool], parameters: str, low: bool, sub_group: int, ratio: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        def run(name: str, *, background: bool) -> list[float]:
            (root / f"nvme-{name}").mkdir()
            options = {
                "offload_optimizer": section("nvme", root / f"nvme-{name}", ratio=ratio), "sub_group_size": sub_group,
                "offload_param": section(parameters, root / f"nvme-{name}"), "update_in_backward": False,
                "precision": Precision(param=torch.bfloat16 if low else None),
            }  # fmt: skip
            model, optimizer = build(root / f"nvme-{name}", **options)
            saver, losses = BackgroundSaver(Communicator()), []
            for step, saves in enumerate(steps):
                losses += train_in(model, optimizer, step, low)
                if saves and background:
                    save_of(saver, optimizer, f"s{step}", root=root / name)
                elif saves:
                    save(root / name, f"s{step}", optimizer.state_slices(), optimizer.state_scalars())
            losses += train_in(model, optimizer, len(steps), low)
            saver.close()
            optimizer.close()
            return losses

        assert run("a", background=True) == run("b", background=False)
        for step, saves in enumerate(steps):
            if saves:
                with load(root / "a", f"s{step}") as found, load(root / "b", f"s{step}") as same:
                    assert list(compare(same, found)) == []


def train_in(model: torch.nn.Sequential, optimizer: ZeroOptimizer, step: int, low: bool) -> list[float]:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = model(x.bfloat16() if low else x).float().square().mean()
    optimizer.backward(loss)
    optimizer.step()
    return [float(loss.detach())]
