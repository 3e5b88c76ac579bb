"""Gloo processes of which one dies in the middle of a save, and directories that may only be read."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpointing.test_checkpoints import check_values, pieces, write
from tests.processes import run_ranks

from zoo.checkpointing import BackgroundSaver, CheckpointError, load, save
from zoo.checkpointing.format.disk import LocalDisk
from zoo.comm import Communicator

WORLD = 3
GROUP_TIMEOUT_S = 20.0


class Fatal(LocalDisk):
    """Kills its process at the call ``at`` whose name and path begin so."""

    def __init__(self, at: str) -> None:
        self._at = at

    def _call(self, what: str) -> None:
        if what.startswith(self._at):
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: Path, num_bytes: int) -> Any:
        self._call(f"create {path.suffix or path.name}")
        return super().create(path, num_bytes)

    def rename(self, path: Path, target: Path) -> None:
        self._call(f"rename {target.name}")
        super().rename(path, target)
        self._call(f"renamed {target.name}")

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._call(f"sync_directory {path.name}")

    def remove(self, path: Path) -> None:
        self._call(f"remove {path.suffix}")
        super().remove(path)


def save_and_die(rank: int, folder: str, victim: int, at: str, tag: str, background: bool) -> tuple[str, float]:
    """What the others are told, and after how long."""
    comm = Communicator()
    save(folder, "one", pieces(rank, WORLD), comm=comm)
    disk = Fatal(at) if rank == victim else LocalDisk()
    began, said = time.monotonic(), "saved"
    try:
        if background:
            saver = BackgroundSaver(comm)
            saver.save(folder, tag, pieces(rank, WORLD, 2.0), disk=disk)
            saver.wait()
        else:
            save(folder, tag, pieces(rank, WORLD, 2.0), comm=comm, disk=disk)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - began


DEATHS = [
    (1, "create .safetensors", "two", False),
    (2, "sync_directory two", "two", False),
    (1, "sync_directory one", "one", True),
    (0, "create .index", "two", False),
    (0, "create .index", "one", True),
    (0, "rename manifest.json", "one", False),
    (0, "renamed manifest.json", "two", False),
    (0, "rename latest", "two", True),
    (0, "remove .index", "one", False),  # the empty one of this save, before the index is written
    (0, "remove .safetensors", "one", False),  # of the save before
]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "at", "tag", "background"), DEATHS)
def test_a_rank_that_is_killed_in_a_save_stops_the_others_and_costs_nothing(
    tmp_path: Path, victim: int, at: str, tag: str, background: bool
) -> None:
    found = run_ranks(
        WORLD, save_and_die, str(tmp_path), victim, at, tag, background, group_timeout_s=GROUP_TIMEOUT_S, timeout=100
    )
    assert set(found) == set(range(WORLD)) - {victim}
    for said, took_s in found.values():
        assert said != "saved"
        assert took_s < 2 * GROUP_TIMEOUT_S
    with load(tmp_path) as opened:
        scale = float(opened.tensor("a")[0, 1])
        assert [size for _, size in opened.verify()]
    committed = at in ("renamed manifest.json", "rename latest", "remove .safetensors")
    if tag == "one":
        assert scale == (2.0 if committed else 1.0)
    elif committed:
        check_values(tmp_path, 2.0, "two")
    else:
        with pytest.raises(CheckpointError):
            load(tmp_path, "two")
    check_values(tmp_path, scale)
    # Whoever comes next saves there as if nothing had been.
    write(tmp_path, 2, tag, 3.0)
    check_values(tmp_path, 3.0)


def in_a_directory_that_is_read_only(rank: int, folder: str) -> list[str]:
    comm, root = Communicator(), Path(folder)
    save(root / "run", "one", pieces(rank, 2), comm=comm)
    with load(root / "run", comm=comm) as found:
        found.tensor("a")
    comm.barrier()
    if rank == 0:
        for path in (root / "run" / "one", root / "run", root):
            path.chmod(0o555)
    comm.barrier()
    if os.geteuid() == 0:  # to whom such a directory is as any other
        os.seteuid(65534)
        try:
            return save_and_load(rank, root, comm)
        finally:
            os.seteuid(0)
    return save_and_load(rank, root, comm)


def save_and_load(rank: int, root: Path, comm: Communicator) -> list[str]:
    """What is said of saving there; loading works."""
    said = []
    for where, tag in (("run", "two"), ("run", "one"), ("other", "one")):
        try:
            save(root / where, tag, pieces(rank, 2, 2.0), comm=comm)
        except CheckpointError as error:
            said.append(str(error))
    with load(root / "run", comm=comm) as found:
        assert found.tag == "one"
        assert torch.equal(found.tensor("a").flatten(), torch.arange(15.0))
        for _ in found.verify():
            pass
    return said


def test_a_directory_that_is_read_only_is_said_on_all_ranks_and_can_be_loaded_from() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        found = run_ranks(2, in_a_directory_that_is_read_only, str(folder))
        assert found[0] == found[1]
        first, second, third = found[0]
        assert first.startswith("saving the checkpoint 'two' in ")
        assert "Permission denied" in first
        assert "Permission denied" in second
        assert "Permission denied" in third
        assert sorted(path.name for path in (folder / "run").iterdir()) == ["latest", "one"]
        check_values(folder / "run")
    finally:
        for path in (folder, folder / "run", folder / "run" / "one"):
            path.chmod(0o755)
        shutil.rmtree(folder)
