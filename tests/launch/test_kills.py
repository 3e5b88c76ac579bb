"""Whatever of a job on three hosts is ended, by whichever signal and whenever: 10 s later nothing of it is left, and
the last lines name what was first.

``make campaign NAME=launch ARGS=tests/launch/test_kills.py`` draws 300 and writes a page.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.bounded import table_of
from tests.launch import kills

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


def draw_and_kill(folder: Path, number: int, record: Callable[[str, object], None]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    with kills.cluster(folder, HOSTS) as made:
        record("drawn", kills.kill(made, folder, kills.Kill.draw(number, seed)))


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(9))
def test_a_drawn_kill_leaves_nothing(tmp_path: Path, turn: int, record_property: Callable[[str, object], None]) -> None:
    draw_and_kill(tmp_path, 6 * turn + random.randrange(6), record_property)


@pytest.mark.campaign
@pytest.mark.parametrize("number", range(300))
def test_drawn_kills(tmp_path: Path, number: int, record_property: Callable[[str, object], None]) -> None:
    draw_and_kill(tmp_path, number, record_property)


def test_kinds_come_as_often() -> None:
    drawn = [kills.Kill.draw(number, 0) for number in range(54)]
    assert len({(one.victim, one.signal, one.moment) for one in drawn}) == 54


def test_a_table_counts_draws() -> None:
    drawn = [("rank SIGKILL", "step", 1.0), ("rank SIGKILL", "step", 2.25), ("agent SIGTERM", "start", 0.5)]
    assert table_of(drawn) == [
        "| | start | step | most seconds |",
        "|---|---|---|---|",
        "| agent SIGTERM | 1 | 0 | 0.5 |",
        "| rank SIGKILL | 0 | 2 | 2.2 |",
        "",
        "3 in all; the longest took 2.2 s.",
    ]
