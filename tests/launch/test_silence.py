"""A host of which nothing is heard is lost, and ends what it has; a terminal that takes nothing for a while is not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.launch import kills
from tests.launch.jobs import launched

from zoo.launch.silence import Silence

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


class Time:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_silence_is_counted_by_turns() -> None:
    clock = Time()
    silence = Silence(10.0, clock)
    assert silence.beat_s == 2.0

    def turn(passed: float, heard: bool = False) -> bool:
        clock.now += passed
        return silence.turn(heard)

    assert not any(turn(2.0) for _ in range(5))
    assert turn(0.5)
    assert not turn(1.0, heard=True)
    assert not turn(1000.0), "the listener itself was stopped; that is two beats of silence"
    assert not turn(6.0)
    assert turn(6.0)


@pytest.mark.slow
def test_a_host_that_falls_silent_is_lost_and_ends_its_ranks(tmp_path: Path) -> None:
    with kills.cluster(tmp_path, HOSTS) as made:
        arguments = [*made.arguments(tmp_path), "--lost-s", "3", "SCRIPT", str(tmp_path), "-"]
        with launched(tmp_path, *arguments, script=kills.SCRIPT, mark=made.mark) as job:
            kills.wait(lambda: kills.moment_of(tmp_path) == "step", job)
            cable = [one.pid for one in kills.processes(made, job) if (one.kind, one.host) == ("sshd", HOSTS[2])]
            os.kill(cable[0], signal.SIGSTOP)
            said = job.finish(30)
            until = time.monotonic() + kills.WITHIN_S
            while (left := made.left(job).keys() - set(cable)) and time.monotonic() < until:
                time.sleep(0.05)
            assert not left, (left, said)
    assert job.process.returncode != 0
    assert "the cause: host 127.0.0.3: nothing has been heard of it for 3 s (--lost-s)" in said


PRINTS = """
import sys, time
for number in range(4000):
    print(number, "x" * 200, flush=True)
time.sleep(3)
print("end")
"""


@pytest.mark.slow
def test_a_terminal_that_takes_nothing_ends_no_job(tmp_path: Path) -> None:
    with kills.cluster(tmp_path, HOSTS[:2]) as made:
        arguments = [*made.arguments(tmp_path), "--lost-s", "1", "--show", "all", "SCRIPT"]
        with launched(tmp_path, *arguments, script=PRINTS, mark=made.mark) as job:
            kills.wait(lambda: any(one.kind == "rank" for one in kills.processes(made, job)), job)
            time.sleep(6)  # pipes of 64 KiB are full on all the way to the ranks
            job.finish(60)
            assert not made.left(job)
    assert job.process.returncode == 0, job.errors
    assert job.said.count(" end\n") == 2
    assert job.said.count("x" * 200) == 2 * 4000
