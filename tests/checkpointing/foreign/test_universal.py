"""Universal checkpoints written here: read again here, and loaded by the real DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpointing.foreign.golden_model import LR, RANKS, Net, batches, groups, loss_of, one_group
from tests.checkpointing.foreign.test_deepspeed import losses, opened

from zoo import sim
from zoo.checkpointing import CheckpointError, load, save
from zoo.checkpointing.foreign import load_deepspeed, write_universal
from zoo.comm import Communicator
from zoo.engine import initialize
from zoo.layout import StateSlice
from zoo.zero import ZeroOptimizer

ROOT = Path(__file__).parents[3]


def saved_by_zoo(root: Path) -> None:
    """Three steps at stage 3 on two ranks, saved as zoo does."""

    def job(rank: int) -> None:
        model = Net()
        optimizer = ZeroOptimizer(
            model, stage=3, params=groups(model), optimizer=torch.optim.AdamW, lr=LR, clip_norm=1.0
        )
        for number in range(3):
            optimizer.backward(loss_of(model, batches(rank)[number]))
            optimizer.step()
            optimizer.zero_grad()
        save(
            root, "three", optimizer.state_slices(), optimizer.state_scalars(), {"client": {"note": 7}}, optimizer.comm
        )

    sim.run(2, job)


def test_what_zoo_saved_comes_back_from_a_universal_checkpoint(tmp_path: Path) -> None:
    saved_by_zoo(tmp_path / "zoo")
    source = load(tmp_path / "zoo")
    write_universal(tmp_path / "ds", "uni", source)
    found = load_deepspeed(tmp_path / "ds")
    assert found.tag == "uni"
    assert found.shapes == source.shapes
    for name, roles in source.roles.items():
        assert set(found.roles[name]) == set(roles)
        for role in roles:
            assert torch.equal(found.tensor(name, role), source.tensor(name, role)), (name, role)
    assert found.scalars == source.scalars
    assert found.meta["client"] == {"note": 7}
    # DeepSpeed's own stage 1 came to the same; its numbers are those of the CPU that they were recorded on, which adds
    # products of fp32 in an order of its own: 3 steps of sums of at most 2**7 terms.
    theirs = opened("stage1").tensor("middle.weight", "exp_avg")
    bound = 3 * 2**7 * torch.finfo(torch.float32).eps * float(theirs.abs().max())
    torch.testing.assert_close(found.tensor("middle.weight", "exp_avg"), theirs, rtol=0, atol=bound)
    with pytest.raises(CheckpointError, match="exists"):
        write_universal(tmp_path / "ds", "uni", source)


def test_an_engines_counters_and_schedule_are_in_a_universal_checkpoint(tmp_path: Path) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.05}}
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "scheduler": schedule, "zero_optimization": {"stage": 2},
    }  # fmt: skip

    def job(rank: int) -> None:
        engine, again = initialize(config, Net())[0], initialize(config, Net())[0]

        def train(one: Any, first: int, last: int) -> list[float]:
            found = []
            for number in range(first, last):
                loss = loss_of(one, batches(rank)[number])
                one.backward(loss)
                one.step()
                found.append(float(loss.detach()))
            return found

        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path / "zoo", "three", client_state={"note": 7})
        if rank == 0:
            write_universal(tmp_path / "ds", "uni", load(tmp_path / "zoo", "three", Communicator.alone()))
        engine.comm.barrier()
        again.load_checkpoint(tmp_path / "ds")
        assert (again.global_steps, again.global_samples, again.skipped_steps) == (3, 24, 0)
        assert again.get_lr() == engine.get_lr()
        assert train(again, 3, 6) == pytest.approx(train(engine, 3, 6), rel=1e-6)

    sim.run(2, job)
    model = torch.load(tmp_path / "ds" / "uni" / "mp_rank_00_model_states.pt", weights_only=False)
    assert model["lr_scheduler"] == {"last_batch_iteration": 2}  # batches are counted from 0
    assert (model["global_steps"], model["global_samples"], model["note"]) == (3, 24, 7)
    options = torch.load(tmp_path / "ds" / "uni" / "zero" / "optimizer_state.pt", weights_only=False)["param_groups"]
    assert options[0]["lr"] == pytest.approx(0.05 * math.log(3) / math.log(8))  # what the fourth step uses


@pytest.mark.parametrize("tag", ["latest", "latest_universal"])
def test_a_tag_that_is_the_name_of_the_file_of_tags_is_refused(tmp_path: Path, tag: str) -> None:
    save(tmp_path / "zoo", "one", [StateSlice("w", r, 0, 2, (2,), torch.ones(2)) for r in ("parameter", "exp_avg")])
    with pytest.raises(CheckpointError, match=f"the tag '{tag}' is the name of a file"):
        write_universal(tmp_path / "ds", tag, load(tmp_path / "zoo"))
    assert not (tmp_path / "ds").exists()


def test_complex_parameters_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    pair = torch.tensor([1 + 2j, 3j])
    save(tmp_path / "zoo", "one", [StateSlice("w", role, 0, 2, (2,), pair) for role in ("parameter", "exp_avg")])
    with pytest.raises(CheckpointError, match="parameter 'w' is complex64, and a universal checkpoint holds fp32"):
        write_universal(tmp_path / "ds", "uni", load(tmp_path / "zoo"))
    assert not (tmp_path / "ds").exists()


def test_names_that_are_no_folders_are_refused(tmp_path: Path) -> None:
    found = opened("stage1")
    for tag in ("..", "a/b", "", ".writing-x"):
        with pytest.raises(CheckpointError, match="name of a folder"):
            write_universal(tmp_path, tag, found)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_goes_on_from_a_universal_checkpoint(stage: int, tmp_path: Path) -> None:
    found = opened("stage3")
    write_universal(tmp_path, "uni", found, found.meta["deepspeed"]["param_groups"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.checkpointing.foreign.universal_peer", str(tmp_path), str(stage)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ranks = [
        subprocess.Popen([*command, str(rank), port], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    ours = losses(found, 2, 2, grouped=one_group if stage == 3 else groups)
    for rank, expected in zip(ranks, ours, strict=True):
        said, _ = rank.communicate(timeout=300)
        assert rank.returncode == 0
        theirs = json.loads([line for line in said.splitlines() if line.startswith("[0.")][-1])
        assert theirs == pytest.approx(expected, rel=1e-6, abs=1e-6)
