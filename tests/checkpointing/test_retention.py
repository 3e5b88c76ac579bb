"""Which checkpoints stay: the newest, the latest, the young and the best."""

from __future__ import annotations

import math
import os
import random
import time
from pathlib import Path

import pytest
import torch
from tests.checkpointing.test_checkpoints import Piece

from zoo.checkpointing import load, prune, save
from zoo.checkpointing.disk import LocalDisk
from zoo.checkpointing.listing import listing

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


@pytest.mark.parametrize("skew_s", [-3e6, -10.0, 3e6])
def test_ages_are_by_the_clock_of_the_file_system(runs: Path, skew_s: float) -> None:
    """Which a machine whose clock is set otherwise does not see: what another is saving just now must stay."""

    class Elsewhere(LocalDisk):
        def modified_s(self, path: Path) -> float | None:
            found = super().modified_s(path)
            return None if found is None else found + skew_s

    for name, age_s in (("now", 0), ("killed", 90_000)):
        (runs / name).mkdir()
        file = runs / name / "0123456789abcdef.00000.safetensors"
        file.touch()
        os.utime(file, (time.time() - age_s,) * 2)
    os.utime(runs / "a" / "manifest.json", (time.time() - 500,) * 2)
    disk = Elsewhere()
    assert prune(runs, 1, older_than_s=100, disk=disk) == ["a"]
    assert (runs / "now").exists()
    assert not (runs / "killed").exists()
    assert prune(runs, 2, disk=disk) == ["b", "c", "d"]
    assert not [path for path in runs.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("seed", range(3))
def test_times_of_files_say_nothing_about_which_is_the_newest(runs: Path, seed: int) -> None:
    dice = random.Random(seed)
    for path in runs.rglob("*"):
        os.utime(path, (dice.uniform(0, 4e9),) * 2)
    assert [one.tag for one in listing(runs)] == sorted(LOSSES)
    assert load(runs).tag == "f"
    (runs / "latest").unlink()
    assert load(runs).tag == "f"
    (runs / "f" / "manifest.json").unlink()
    assert load(runs).tag == "e"
    assert prune(runs, 2) == ["a", "b", "c"]


def test_what_cannot_be_looked_at_is_not_removed(runs: Path) -> None:
    """A file that goes while its age is asked for: its save is cleaning up, and others may be at work beside it."""

    class Going(LocalDisk):
        def modified_s(self, path: Path) -> float | None:
            return None if path.name.startswith("0123456789abcdef.00000") else super().modified_s(path)

    rest = runs / "g"
    rest.mkdir()
    for number in range(2):
        (rest / f"0123456789abcdef.{number:05d}.safetensors").touch()
    prune(runs, 6, rest_age_s=0.0, disk=Going())
    assert len(list(rest.iterdir())) == 2
    prune(runs, 6, rest_age_s=0.0)
    assert not rest.exists()


def test_the_best_of_what_can_be_read_stays_beside_damage(runs: Path) -> None:
    (runs / "d" / "manifest.json").write_text("{")
    assert prune(runs, 1, best="min:client.loss") == ["a", "c", "e"]
    assert left(runs) == "bdf"
