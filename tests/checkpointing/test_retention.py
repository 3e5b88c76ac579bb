"""Which checkpoints stay: the newest, the latest, the young and the best."""

from __future__ import annotations

import logging
import math
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zoo.checkpointing import CheckpointError, load, prune, save
from zoo.checkpointing.format.disk import LocalDisk
from zoo.checkpointing.listing import listing
from zoo.layout import StateSlice

LOSSES = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 1.0, "e": math.nan, "f": 2.5}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for tag, loss in LOSSES.items():
        save(
            tmp_path, tag, [StateSlice("w", "parameter", 0, 1, (1,), torch.ones(1))], {"accuracy": -loss, "zero/x": 1},
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


def one(root: Path, tag: str, value: float = 1.0, **given: Any) -> None:
    save(root, tag, [StateSlice("w", "parameter", 0, 1, (1,), torch.full((1,), value))], **given)


def test_links_are_no_checkpoints(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One beside the tags, one to another directory, one that leads nowhere: neither they nor their targets go."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    one(elsewhere, "x")
    for name, target in (("best", "f"), ("a0", elsewhere / "x"), ("z", "gone")):
        (runs / name).symlink_to(target)
    assert prune(runs, 2) == ["a", "b", "c", "d"]
    assert load(runs).tag == "f"
    assert load(runs, "best").tag == "best"
    assert load(elsewhere).tag == "x"
    assert all((runs / name).is_symlink() for name in ("best", "a0", "z"))
    (runs / "latest").write_text("first\n")
    (runs / "first").symlink_to("e")
    assert prune(runs, 1) == []  # e is what latest names


def test_what_is_damaged_does_not_count(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    for tag in "df":
        next((runs / tag).glob("*.safetensors")).unlink()
    assert prune(runs, 2, dry_run=True) == ["a", "b"]
    assert left(runs) == "abcdef"
    assert prune(runs, 2) == ["a", "b"]
    assert "the checkpoint 'f' does not count as one that is kept" in caplog.text
    assert left(runs) == "cdef"
    assert load(runs).tag == "e"
    next((runs / "e").glob("*.index")).write_bytes(b"")
    assert prune(runs, 1) == []
    assert left(runs) == "cdef"
    assert load(runs).tag == "c"


class Meanwhile(LocalDisk):
    """Before the first manifest is removed, somebody else does something."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def remove(self, path: Path) -> None:
        what, self.what = self.what, None
        if what is not None and path.name == "manifest.json":
            what()
        super().remove(path)


def test_what_latest_names_by_now_stays(runs: Path) -> None:
    gone = prune(runs, 1, disk=Meanwhile(lambda: (runs / "latest").write_text("c\n")))
    assert gone == ["a", "b", "d", "e"]
    assert left(runs) == "cf"


def test_what_is_saved_anew_meanwhile_stays(runs: Path) -> None:
    assert prune(runs, 1, disk=Meanwhile(lambda: one(runs, "c", 9.0, latest=False))) == ["a", "b", "d", "e"]
    assert float(load(runs, "c").tensor("w")[0]) == 9.0


def test_a_damaged_one_of_the_same_number_that_is_saved_anew_stays(runs: Path) -> None:
    """Savers at the same time give equal numbers: the attempt tells them apart."""

    def again() -> None:
        text = (runs / "c" / "manifest.json").read_text()
        number = text[text.index('"number"') :].partition(",")[0]
        one(runs, "c", 9.0, latest=False)
        new = (runs / "c" / "manifest.json").read_text()
        changed = new.replace(new[new.index('"number"') :].partition(",")[0], number)
        (runs / "c" / "manifest.json").write_text(changed)

    assert prune(runs, 1, disk=Meanwhile(again)) == ["a", "b", "d", "e"]
    assert "c" in left(runs)


def test_two_that_prune_at_once(runs: Path) -> None:
    assert prune(runs, 1, disk=Meanwhile(lambda: prune(runs, 1))) == []
    assert left(runs) == "f"


def test_ranks_that_all_prune(tmp_path: Path) -> None:
    for number in range(12):
        one(tmp_path, f"s{number:02d}")
    with ThreadPoolExecutor(4) as threads:
        gone = list(threads.map(lambda _: prune(tmp_path, 1), range(4)))
    assert sorted(tag for tags in gone for tag in tags) == [f"s{number:02d}" for number in range(11)]
    assert load(tmp_path).tag == "s11"


@pytest.mark.parametrize(
    "kind", [torch.tensor, np.float32, np.array, lambda x: np.array([x]), lambda x: torch.tensor([[x]])]
)
def test_a_number_of_torch_or_numpy_is_one(tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    for tag, loss in (("a", 0.9), ("b", kind(0.125)), ("c", torch.zeros(2)), ("d", True), ("e", 1.0)):
        one(tmp_path, tag, meta={"loss": loss})
    assert prune(tmp_path, 1, best="min:loss") == ["a", "c", "d"]
    assert left(tmp_path) == "be"
    assert "these have no number there, and do not count: c, d" in caplog.text


def test_a_number_that_no_float_holds(tmp_path: Path) -> None:
    for tag, loss in (("a", 1), ("b", 10**400), ("c", 10**400 + 1), ("d", math.inf), ("e", 0)):
        one(tmp_path, tag, meta={"loss": loss})
    assert prune(tmp_path, 1, best="max:loss") == ["a", "b", "c"]


def test_the_best_is_one_that_can_be_opened(runs: Path) -> None:
    next((runs / "d").glob("*.safetensors")).unlink()
    assert prune(runs, 1, best="min:client.loss") == ["a", "c", "d", "e"]
    assert load(runs, "b").tag == "b"


class Private(LocalDisk):
    """A folder of another user, and a manifest of another user."""

    def names(self, path: Path) -> list[str]:
        if path.name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return super().names(path)

    def open(self, path: Path) -> Any:
        if path.parent.name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return super().open(path)


def test_a_folder_that_may_not_be_listed_hurts_nobody(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    (runs / "private").mkdir()
    disk = Private()
    assert [found.tag for found in listing(runs, disk=disk)] == list("abcdef")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'g' in .* it holds a, b, c, d, e, f"):
        load(runs, "g", disk=disk)
    (runs / "latest").unlink()
    assert load(runs, disk=disk).tag == "f"
    assert prune(runs, 5, disk=disk) == ["a"]
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="Permission denied"):
        load(runs, "private", disk=disk)
