"""SIGTERM at any moment of the main job: resuming gives the curve of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests import processes
from tests.cli.test_cli import CLI, TINY

RANKS = 2
STOPPED = 75
PROGRAM = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); del sys.argv[1]\n" + CLI


def job(config: Path, folder: Path, *args: str) -> list[Any]:
    """The ranks of a launch; each has written its process number into ``folder``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "LOCAL_WORLD_SIZE": str(RANKS)}
    started = []
    for rank in range(RANKS):
        (folder / f"pid_{rank}").unlink(missing_ok=True)  # of the launch before
        with open(folder / f"said_{rank}", "w") as said:
            env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = [folder / f"pid_{rank}", "train", config, *args]
            started.append(processes.start(PROGRAM, *words, stdout=said, stderr=said, env=env))
    return started


def numbers(folder: Path) -> list[int]:
    end = time.monotonic() + 60
    found: list[int] = []
    for rank in range(RANKS):
        path = folder / f"pid_{rank}"
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < end
            time.sleep(0.002)
        found.append(int(path.read_text()))
    return found


def curve(out: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(text) for text in (out / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"], line.get("validation_loss")) for line in lines]


def end(ranks: list[Any]) -> list[int]:
    try:
        return [rank.wait(120) for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
        raise


def disturb(tmp_path: Path, kills: int, seed: int) -> dict[str, int]:
    """As many launches are ended, by SIGTERM at moments drawn over what a launch takes; what became of all launches."""
    dice = random.Random(seed)
    written = {
        **TINY,
        "zero_optimization": {"stage": 3},
        "train": {**TINY["train"], "steps": 40, "checkpoint_every": 7},
    }

    def configured(out: str) -> Path:
        path = tmp_path / f"{out}.json"
        path.write_text(json.dumps({**written, "train": {**written["train"], "out": str(tmp_path / out)}}))
        return path

    takes = 0.0
    for out in ("first", "whole"):  # the first one starts the server of processes, too
        began = time.monotonic()
        assert end(job(configured(out), tmp_path)) == [0, 0], (tmp_path / "said_0").read_text()
        takes = time.monotonic() - began
    expected = curve(tmp_path / "whole")
    found = {"stopped": 0, "killed": 0, "finished": 0}
    done = run = 0
    while done < kills:
        run += 1
        config, finished = configured(f"out{run}"), False
        while not finished:
            ranks = job(config, tmp_path, "--resume")
            victims = numbers(tmp_path)
            if done < kills:
                time.sleep(dice.uniform(0, takes))
                for victim in victims:
                    try:
                        os.kill(victim, signal.SIGTERM)
                    except ProcessLookupError:
                        continue
            codes = end(ranks)
            said = (tmp_path / "said_0").read_text() + (tmp_path / "said_1").read_text()
            finished = codes == [0, 0]
            kind = "finished" if finished else "stopped" if codes == [STOPPED] * RANKS else "killed"
            # Before and after its loop a rank dies of the signal; its peer may say that it is gone, or have ended.
            assert kind != "killed" or all(code in (-15, 143, 1, STOPPED, 0) for code in codes), (codes, said)
            assert kind != "stopped" or "the checkpoint is written, --resume goes on" in said
            found[kind] += 1
            done += not finished  # a signal that came too late does not count
        assert curve(tmp_path / f"out{run}") == expected
    return found


@pytest.mark.slow
def test_a_drawn_share(tmp_path: Path) -> None:
    found = disturb(tmp_path, 3, seed=random.SystemRandom().randrange(2**30))
    assert found["stopped"] + found["killed"] == 3


@pytest.mark.campaign
def test_fifty_times(tmp_path: Path) -> None:
    found = disturb(tmp_path, 50, seed=random.SystemRandom().randrange(2**30))
    print(f"launches: {found}")
    assert found["stopped"] + found["killed"] == 50
    assert found["stopped"] > 10
