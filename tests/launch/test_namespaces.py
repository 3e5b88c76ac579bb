"""Hosts that are network namespaces: kills over them, and a cable that is cut."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts.real import netns
from tests.launch import kills
from tests.launch.jobs import launched
from tests.launch.test_many_nodes import TRAIN, losses, until_training_again

_MISSING = netns.missing()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
Record = Callable[[str, object], None]


def draw_and_kill(folder: Path, number: int, record: Record) -> None:
    seed = random.SystemRandom().randrange(2**32)
    with kills.apart(folder, 2) as made:
        kind, moment, seconds = kills.kill(made, folder, kills.Kill.draw(number, seed))
        record("drawn", (f"{kind}, two namespaces", moment, seconds))


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(3))
def test_a_drawn_kill_leaves_nothing(tmp_path: Path, turn: int, record_property: Record) -> None:
    draw_and_kill(tmp_path, 18 * turn + random.randrange(18), record_property)


@pytest.mark.campaign
@pytest.mark.parametrize("number", range(108))
def test_drawn_kills(tmp_path: Path, number: int, record_property: Record) -> None:
    draw_and_kill(tmp_path, number, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 0])
def test_a_cable_that_is_cut_ends_the_job_on_both_sides(tmp_path: Path, number: int) -> None:
    """That of another host, or of the launcher's own, which finds all others silent."""
    with kills.apart(tmp_path, 3) as made:
        arguments = [*made.arguments(tmp_path), "--lost-s", "3", "SCRIPT", str(tmp_path), "-"]
        with launched(tmp_path, *arguments, script=kills.SCRIPT, mark=made.mark, before=made.before) as job:
            kills.wait(lambda: kills.moment_of(tmp_path) == "step", job)
            netns.cut(made.mark, number)
            said = job.finish(30)
            until = time.monotonic() + kills.WITHIN_S
            while (left := kills.ours(made.left(job))) and time.monotonic() < until:
                time.sleep(0.05)
            assert not left, (left, said)
    assert job.process.returncode != 0
    silent = {number} if number else {1, 2}
    for other in silent:
        assert f"host {made.hosts[other]} failed" in said or f"the cause: host {made.hosts[other]}: " in said
    assert ": nothing has been heard of it for 3 s (--lost-s): it is off, or a cable is" in said.splitlines()[-1]


@pytest.mark.slow
def test_training_goes_on_without_the_host_behind_a_cut_cable(tmp_path: Path, record_property: Record) -> None:
    alone, many = tmp_path / "alone", tmp_path / "many"
    for folder in (alone, many):
        folder.mkdir()
    with launched(alone, "--ranks", "1", "SCRIPT", str(alone), "80", script=TRAIN) as job:
        job.finish(240)
    expected = losses(job.said)
    (many / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={netns.DEVICE}\n")
    with kills.apart(many, 3) as made:
        arguments = [*made.arguments(many), "--max-restarts", "1", "--min-nodes", "2", "SCRIPT", str(many), "80"]
        with launched(many, *arguments, script=TRAIN, mark=made.mark, before=made.before) as job:
            job.wait_for_ranks(3)
            kills.wait(lambda: list((many / "checkpoints").glob("latest*")), job)
            lost_at = time.time()
            netns.cut(made.mark, 2)
            job.finish(240)
            until = time.monotonic() + 30
            while (left := kills.ours(made.left(job))) and time.monotonic() < until:
                time.sleep(0.05)
            assert not left, left
    assert job.process.returncode == 0, job.errors
    found = losses(job.said)
    assert {world for world, *_ in found.values()} == {2, 3}
    assert {step: loss for step, (_, loss, _) in found.items()} == pytest.approx(
        {step: loss for step, (_, loss, _) in expected.items()}, rel=1e-6
    )
    again_s, phases = until_training_again(many, lost_at, found)
    record_property("seconds until training again", f"{again_s:.1f}: {phases}")
    assert again_s < 30, phases
