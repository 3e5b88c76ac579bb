"""Which checkpoints stay: the newest, the latest, the young and the best."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
import torch
from tests.checkpointing.test_checkpoints import Piece

from zoo.checkpointing import prune, save

LOSSES = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 1.0, "e": math.nan, "f": 2.5}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for tag, loss in LOSSES.items():
        save(
            tmp_path, tag, [Piece("w", "parameter", 0, 1, (1,), torch.ones(1))], {"accuracy": -loss, "zero/x": 1},
            {"client": {"loss": loss, "text": "1"}},
        )  # fmt: skip
    return tmp_path


def left(root: Path) -> str:
    return "".join(sorted(path.name for path in root.iterdir() if path.is_dir()))


@pytest.mark.parametrize(
    ("best", "stay"),
    [
        (None, "ef"),
        ("min:client.loss", "def"),
        ("max:client.loss", "aef"),
        ("max:accuracy", "def"),
        ("min:zero/x", "ef"),
    ],
)
def test_the_best_stays_the_newest_of_several(runs: Path, best: str | None, stay: str) -> None:
    assert "".join(prune(runs, 2, best=best)) == "".join(sorted(set("abcdef") - set(stay)))
    assert left(runs) == stay


@pytest.mark.parametrize(
    "best", ["min", "min:", "mean:client.loss", "min:client", "min:client.text", "min:client.loss.x"]
)
def test_a_best_that_cannot_be_told_removes_nothing(runs: Path, best: str) -> None:
    with pytest.raises(ValueError, match=r"it is min: or max:|has a number there"):
        prune(runs, 1, best=best)
    assert left(runs) == "abcdef"


def test_the_young_stay(runs: Path) -> None:
    for tag, age_s in (("a", 500), ("b", 50), ("c", 300)):
        os.utime(runs / tag / "manifest.json", (time.time() - age_s,) * 2)
    assert prune(runs, 1, older_than_s=1000) == []
    assert prune(runs, 1, older_than_s=100) == ["a", "c"]
    assert prune(runs, 1) == ["b", "d", "e"]
    assert left(runs) == "f"


def test_the_best_of_what_can_be_read_stays_beside_damage(runs: Path) -> None:
    (runs / "d" / "manifest.json").write_text("{")
    assert prune(runs, 1, best="min:client.loss") == ["a", "c", "e"]
    assert left(runs) == "bdf"
