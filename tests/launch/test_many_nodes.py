"""``zoo launch`` on several hosts, which a stand-in for ssh finds on this one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
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
  *) exec sh -c "$2";;
esac
"""


def hosts(folder: Path, *names: str, slots: int = 1) -> list[str]:
    """Arguments for these hosts."""
    (folder / "hosts").write_text("".join(f"{name} slots={slots}\n" for name in names))
    (folder / "ssh").write_text(SSH)
    return ["--ssh", f"sh {folder / 'ssh'}", "-H", str(folder / "hosts")]


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


def processes_of(mark: str, word: str) -> list[int]:
    return [pid for pid, line in alive(mark).items() if word in line]


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
import torch, torch.distributed as dist
from zoo.launch import shares

folder, steps, batch = sys.argv[1], int(sys.argv[2]), 12
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
begin, file = 0, os.path.join(folder, "checkpoint")
if os.path.exists(file):
    found = torch.load(file)
    begin = found["step"]
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
open(os.path.join(folder, f"{rank}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"), "w").write(str(os.getpid()))
mine = shares(batch, world, 2)
for step in range(begin, steps):
    data = torch.randn(batch, 6, generator=torch.Generator().manual_seed(step), dtype=torch.double)
    target, at, total = data.sum(1, keepdim=True).sin(), sum(map(sum, mine[:rank])), torch.zeros((), dtype=torch.double)
    for size in mine[rank]:
        part, at = slice(at, at + size), at + size
        loss = (model(data[part]) - target[part]).square().sum() / batch
        loss.backward()
        total += loss.detach()
    for tensor in [total, *(p.grad for p in model.parameters())]:
        dist.all_reduce(tensor)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(json.dumps([step, world, total.item(), time.time()]), flush=True)
        torch.save({"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file + ".new")
        os.replace(file + ".new", file)
    if steps > 60 and world == 3:
        time.sleep(0.05)
dist.destroy_process_group()
"""


def losses(text: str) -> dict[int, list[Any]]:
    return {line[0]: line[1:] for line in map(json.loads, text.splitlines())}


@pytest.mark.slow
def test_one_of_three_hosts_is_lost_and_training_goes_on_with_the_same_losses(tmp_path: Path) -> None:
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
    again_s = min(moment for world, _, moment in found.values() if world == 2) - lost_at
    assert again_s < 30


@pytest.mark.slow
def test_any_number_of_ranks_gives_one_curve(tmp_path: Path) -> None:
    curves = []
    for world in (1, 2, 3, 5, 7, 8):
        folder = tmp_path / str(world)
        folder.mkdir()
        with launched(folder, "--ranks", str(world), "SCRIPT", str(folder), "20", script=TRAIN) as job:
            job.finish(240)
        assert job.process.returncode == 0, job.errors
        curves.append([loss for _, loss, _ in losses(job.said).values()])
    assert len(curves[0]) == 20
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-6)


@pytest.mark.campaign
@pytest.mark.parametrize("draw", range(100))
def test_drawn_kills_over_three_hosts(tmp_path: Path, draw: int) -> None:
    """Of ssh, a keeper, an agent, a rank or the supervisor, at a moment drawn from the start on."""
    chance = random.Random()
    arguments = hosts(tmp_path, "127.0.0.1", "127.0.0.2", "127.0.0.3")
    with launched(tmp_path, *arguments, "--grace-s", "2", "SCRIPT", "wait", str(tmp_path)) as job:
        time.sleep(chance.uniform(0.0, 3.0))
        there = alive(job.mark)
        pid = chance.choice([one for one, line in there.items() if "sleep" not in line] or [job.process.pid])
        name = chance.choice(["SIGKILL", "SIGTERM", "SIGINT"])
        os.kill(pid, signal.Signals[name])
        said = job.finish(14)
        assert job.left(max(0.0, 10 - job.took_s)) == [], (name, there.get(pid))
    assert job.process.returncode != 0, (name, there.get(pid), said)
