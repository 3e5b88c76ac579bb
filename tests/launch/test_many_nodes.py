"""``zoo launch`` on several hosts, which a stand-in for ssh finds on this one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.launch.jobs import alive, launched

SSH = """#!/bin/sh
case $1 in
  nowhere) echo "ssh: Could not resolve hostname nowhere" >&2; exit 255;;
  silent) exec sleep 300;;
  late) sh -c "$2" | sed -u 's/"time": [0-9]*/"time": 1000000000/';;
  other) sh -c "$2" | sed -u 's/"torch": "/"torch": "9/';;
  apart) cd /; sh -c "exec ${2#*; exec}";;
  deaf) GLOO_SOCKET_IFNAME=none7 exec sh -c "$2";;
  *) exec sh -c "$2";;
esac
"""


def hosts(folder: Path, *names: str, slots: int = 1) -> list[str]:
    """Arguments for these hosts."""
    (folder / "hosts").write_text("".join(f"{name} slots={slots}\n" for name in names))
    (folder / "ssh").write_text(SSH)
    return ["--ssh", f"sh {folder / 'ssh'}", "-H", str(folder / "hosts")]


@pytest.mark.dear
def test_ranks_are_numbered_over_the_hosts(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "UCX_MINE", "FROM_FILE")
    script = f"import os; print(*(os.environ[name] for name in {names}))"
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=two words\n")
    arguments = hosts(tmp_path, "127.0.0.1", "127.0.0.2", slots=2)
    with launched(tmp_path, *arguments, "--show", "all", "SCRIPT", script=script, UCX_MINE="1") as job:
        job.finish()
        assert job.left(1) == []
    expected = [f"[rank {r}] {r} {r % 2} {r // 2} 4 127.0.0.1 1 two words" for r in range(4)]
    assert sorted(job.said.splitlines()) == expected, job.errors


@pytest.mark.dear
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("nowhere", r"host nowhere: the connection to its agent ended before its ranks did (exit code 255)"),
        ("silent", "host silent: it has not answered within 2 s"),
        ("late", "host late: its clock is -"),
        ("other", "host other: it has torch 9"),
    ],
)
def test_a_bad_host_is_named_and_nothing_starts(tmp_path: Path, bad: str, said: str) -> None:
    arguments = hosts(tmp_path, "127.0.0.1", bad)
    seconds = "2" if bad == "silent" else "60"
    with launched(tmp_path, *arguments, "--start-s", seconds, "SCRIPT", "wait", str(tmp_path)) as job:
        found = job.finish(30)
        assert job.left(3) == []
    assert job.process.returncode != 0
    assert f"the cause: {said}" in found
    assert not (tmp_path / "0.0").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("127.0.0.2", ""),
        ("apart", "host apart does not share this folder; mount it there"),
        ("deaf", "rank 1 on host deaf: "),
        ("127.0.0.2 127.0.0.3", ""),
    ],
)
def test_a_look_at_the_hosts_before_the_start(tmp_path: Path, bad: str, said: str) -> None:
    arguments = hosts(tmp_path, "127.0.0.1", *bad.split())
    with launched(tmp_path, *arguments, "--check", "SCRIPT", "go", str(tmp_path), inside=True) as job:
        found = job.finish(120)
        assert job.left(3) == []
    assert (job.process.returncode == 0) == (not said), found
    assert (tmp_path / "0.0").exists() == (not said)
    assert not said or f"the cause: {said}" in found or said in found.splitlines()[-1]
    assert not list(tmp_path.glob(".zoo-launch-check*"))


def processes_of(mark: str, word: str) -> list[int]:
    return [pid for pid, line in alive(mark).items() if word in line]


@pytest.mark.dear
def test_a_host_that_is_lost_ends_the_job(tmp_path: Path) -> None:
    arguments = hosts(tmp_path, "127.0.0.1", "127.0.0.2")
    with launched(tmp_path, *arguments, "--grace-s", "2", "SCRIPT", "wait", str(tmp_path)) as job:
        ranks = job.wait_for_ranks(2)
        os.kill(job.above(job.above(ranks[1])), signal.SIGKILL)
        said = job.finish(12)
        assert job.left(max(0.0, 10 - job.took_s)) == []
    assert job.process.returncode != 0
    assert "the cause: host 127.0.0.2: " in said


AGAIN = """
import os, sys, time
generation, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
open(os.path.join(sys.argv[1], f"{rank}.{generation}"), "w").write(str(os.getpid()))
if generation == "0":
    time.sleep(200)
print("went on with", os.environ["WORLD_SIZE"])
"""


@pytest.mark.dear
def test_the_hosts_that_are_left_go_on(tmp_path: Path) -> None:
    arguments = hosts(tmp_path, "127.0.0.1", "127.0.0.2", "127.0.0.3")
    arguments += ["--max-restarts", "1", "--min-nodes", "2", "--grace-s", "2"]
    with launched(tmp_path, *arguments, "SCRIPT", str(tmp_path), script=AGAIN) as job:
        ranks = job.wait_for_ranks(3)
        os.kill(job.above(job.above(ranks[0])), signal.SIGKILL)  # that of rank 0, whose store is lost with it
        job.finish(30)
        assert job.left(2) == []
    assert (job.process.returncode, job.said) == (0, "went on with 2\n"), job.errors
    assert "zoo launch: restart 1 of 1, on 127.0.0.2, 127.0.0.3." in job.errors


@pytest.mark.slow
def test_too_few_hosts_do_not_go_on(tmp_path: Path) -> None:
    arguments = [*hosts(tmp_path, "127.0.0.1", "127.0.0.2"), "--max-restarts", "1", "--grace-s", "2"]
    with launched(tmp_path, *arguments, "SCRIPT", str(tmp_path), script=AGAIN) as job:
        ranks = job.wait_for_ranks(2)
        os.kill(job.above(job.above(ranks[1])), signal.SIGKILL)
        said = job.finish(12)
    assert job.process.returncode != 0
    assert "restart" not in said


TRAIN = """
import json, os, sys, time

folder, steps = sys.argv[1], int(sys.argv[2])

def moment(name):
    with open(os.path.join(folder, f"moments.{os.environ['TORCHELASTIC_RESTART_COUNT']}"), "a") as file:
        file.write(f"{name} {time.time()}\\n")

moment("started")
import torch
from torch.utils.data import TensorDataset
from zoo.engine import initialize

moment("imported")

class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()

    def forward(self, x, y):
        return (self.body(x) - y).square().mean()

x = torch.randn(1200, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
checkpoints = os.path.join(folder, "checkpoints")
config = {
    "train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}, "steps_per_print": None,
    "elasticity": {"enabled": True, "resume_from": checkpoints},
}
engine, *_ = initialize(config, Regression(), training_data=TensorDataset(x, x.sum(1, keepdim=True).sin()))
moment("resumed")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
open(os.path.join(folder, f"{rank}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"), "w").write(str(os.getpid()))
while engine.global_steps < steps:
    loss = float(engine.train_batch())
    if rank == 0:
        print(json.dumps([engine.global_steps - 1, world, loss, time.time()]), flush=True)
    if engine.global_steps % 5 == 0:
        engine.save_checkpoint(checkpoints)
    if steps > 60 and world == 3:
        time.sleep(0.05)
"""


def until_training_again(folder: Path, lost_at: float, found: Mapping[int, Sequence[Any]]) -> tuple[float, str]:
    """Seconds from the loss of a host to the first step without it, and what the last rank's took one by one."""
    last: dict[str, float] = {}
    for line in (folder / "moments.1").read_text().splitlines():
        name, _, moment = line.partition(" ")
        last[name] = max(last.get(name, 0.0), float(moment))
    trained = min(moment for world, _, moment in found.values() if world == 2)
    names = ("noticed and formed anew", "imports", "ranks met and checkpoint loaded", "first step")
    moments = [lost_at, last["started"], last["imported"], last["resumed"], trained]
    each = zip(names, moments, moments[1:], strict=False)
    return trained - lost_at, ", ".join(f"{name} {after - before:.1f}" for name, before, after in each)


def losses(text: str) -> dict[int, list[Any]]:
    return {line[0]: line[1:] for line in map(json.loads, text.splitlines())}


@pytest.mark.slow
def test_one_of_three_hosts_is_lost_and_training_goes_on_with_the_same_losses(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    alone, many = tmp_path / "alone", tmp_path / "many"
    for folder in (alone, many):
        folder.mkdir()
    with launched(alone, "--ranks", "1", "SCRIPT", str(alone), "80", script=TRAIN) as job:
        job.finish(120)
    expected = losses(job.said)
    arguments = [*hosts(many, "127.0.0.1", "127.0.0.2", "127.0.0.3"), "--max-restarts", "1", "--min-nodes", "2"]
    with launched(many, *arguments, "SCRIPT", str(many), "80", script=TRAIN) as job:
        ranks = job.wait_for_ranks(3)
        time.sleep(1)
        lost_at = time.time()
        os.kill(job.above(job.above(ranks[2])), signal.SIGKILL)
        job.finish(120)
    assert job.process.returncode == 0, job.errors
    found = losses(job.said)
    assert {world for world, *_ in found.values()} == {2, 3}
    assert {step: loss for step, (_, loss, _) in found.items()} == pytest.approx(
        {step: loss for step, (_, loss, _) in expected.items()}, rel=1e-6
    )
    again_s, phases = until_training_again(many, lost_at, found)
    record_property("seconds until training again", f"{again_s:.1f}: {phases}")
    assert again_s < 30, phases


@pytest.mark.slow
def test_any_number_of_ranks_gives_one_curve(tmp_path: Path) -> None:
    curves = []
    for world in (1, 3, 5):  # on simulated ranks: any (tests/engine/test_elastic.py)
        folder = tmp_path / str(world)
        folder.mkdir()
        with launched(folder, "--ranks", str(world), "SCRIPT", str(folder), "20", script=TRAIN) as job:
            job.finish(240)
        assert job.process.returncode == 0, job.errors
        curves.append([loss for _, loss, _ in losses(job.said).values()])
    assert len(curves[0]) == 20
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-6)
