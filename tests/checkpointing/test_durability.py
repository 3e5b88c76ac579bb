"""The order of writes that makes a crash harmless, on a disk that loses what was not forced.

Law 6: after a crash at any call, of one rank or of several, the last checkpoint that save() returned is whole, whatever
the disk made of what was not forced; and nothing half-written is taken for whole.
"""

from __future__ import annotations

import errno
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpointing.model_disk import ENTRIES, ModelDisk, PowerLossError
from tests.checkpointing.test_checkpoints import SHAPES, pieces, value
from tests.profiles import examples

from zoo import sim
from zoo.checkpointing import CheckpointError, load, save
from zoo.checkpointing.format.disk import put
from zoo.comm import Communicator

ROOT = Path("/runs/a")


def scale_of(disk: ModelDisk, tag: str | None = None) -> float:
    """Which checkpoint is loaded; all of its values are looked at."""
    found = load(ROOT, tag, disk=disk)
    scale = float(found.tensor("a")[0, 1])
    for name in SHAPES:
        for role in ("parameter", "exp_avg"):
            assert torch.equal(found.tensor(name, role).flatten(), value(name, role) * scale), (name, role)
    return scale


def saved(disk: ModelDisk, tag: str, scale: float, size: int = 1) -> None:
    def job(rank: int) -> None:
        save(ROOT, tag, pieces(rank, size, scale), comm=Communicator(), disk=disk)

    if size == 1:
        save(ROOT, tag, pieces(0, 1, scale), disk=disk)
    else:
        sim.run(size, job)


def crash(disk: ModelDisk, at: int, job: Callable[[], Any]) -> bool:
    """Lose power at the ``at``-th call from now; whether that was before its end."""
    disk.crash_at = len(disk.calls) + at
    try:
        job()
    except PowerLossError:
        return True
    except sim.RankError as error:
        if "PowerLossError" not in str(error):
            raise
        return True
    finally:
        disk.crash_at = None
    return False


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("second", ["two", "one"])
@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("size", [1, 2])
def test_after_a_crash_at_any_call_the_last_checkpoint_that_was_returned_loads(
    size: int, entries: str, second: str
) -> None:
    """ "one" replaces the checkpoint that is there. Saving then goes on as if nothing had been."""
    seen, count = [], 0
    while True:
        disk = ModelDisk()
        saved(disk, "one", 1.0, size)
        crashed = crash(disk, count, lambda disk=disk: saved(disk, second, 2.0, size))  # type: ignore[misc]
        after = disk.after_a_crash(entries)
        try:
            seen.append(scale_of(after))
        except ValueError as error:
            raise AssertionError(f"after {disk.calls[: len(disk.calls)][-1]} ({entries}): {error}") from error
        saved(after, second, 3.0, size)
        assert scale_of(after.after_a_crash(entries)) == 3.0
        if not crashed:
            break
        count += 1
    assert count > 10
    assert seen[0] == 1.0
    assert seen[-1] == 2.0
    if size == 1:
        assert seen == sorted(seen)


def sectors(data: st.DataObject) -> Callable[[], bool]:
    """Which sectors that were not forced arrive: some of them, or the first ones."""
    dice = random.Random(data.draw(st.integers(0, 2**32)))
    if data.draw(st.booleans()):
        share = data.draw(st.sampled_from([0.1, 0.5, 0.9]))
        return lambda: dice.random() < share
    first = itertools.count(data.draw(st.integers(-30, 0)))
    return lambda: next(first) < 0


@examples(times=8)
@given(
    size=st.integers(1, 2), second=st.sampled_from(["two", "one"]), entries=st.sampled_from(ENTRIES),
    at=st.integers(0, 40), data=st.data(),
)  # fmt: skip
def test_writes_that_a_crash_has_torn_are_never_taken_for_whole(
    size: int, second: str, entries: str, at: int, data: st.DataObject
) -> None:
    disk = ModelDisk()
    saved(disk, "one", 1.0, size)
    crashed = crash(disk, at, lambda: saved(disk, second, 2.0, size))
    after = disk.after_a_crash(entries, sectors(data))
    assert scale_of(after) in ((1.0, 2.0) if crashed else (2.0,))
    saved(after, second, 3.0, size)
    assert scale_of(after.after_a_crash(entries)) == 3.0


def test_torn_writes_would_be_seen_where_nothing_is_forced() -> None:
    dice, lost = random.Random(0), 0
    for _ in range(20):
        disk = ModelDisk(mute=frozenset({"sync"}))
        saved(disk, "one", 1.0)
        try:
            scale_of(disk.after_a_crash("now", lambda: dice.random() < 0.9))
        except CheckpointError:
            lost += 1
    assert lost > 5


@pytest.mark.parametrize("entries", ENTRIES)
def test_the_first_checkpoint_of_a_directory_is_whole_or_not_there(entries: str) -> None:
    count, outcomes = 0, set()
    while True:
        disk = ModelDisk()
        crashed = crash(disk, count, lambda disk=disk: saved(disk, "one", 1.0))  # type: ignore[misc]
        try:
            outcomes.add(scale_of(disk.after_a_crash(entries)))
        except CheckpointError as error:
            if not crashed:
                raise AssertionError(str(error)) from error
            outcomes.add(0.0)
        if not crashed:
            break
        count += 1
    assert outcomes == {0.0, 1.0}


@pytest.mark.parametrize("mute", ["sync", "sync_directory"])
def test_a_missing_fsync_would_be_seen(mute: str) -> None:
    """The tests above can fail: on a disk on which one kind of forcing does nothing, checkpoints are lost."""
    disk = ModelDisk(mute=frozenset({mute}))
    saved(disk, "one", 1.0)
    lost = 0
    for entries in ENTRIES:
        try:
            scale_of(disk.after_a_crash(entries))
        except CheckpointError:
            lost += 1
    assert lost


def small(disk: ModelDisk, tag: str, scale: float) -> None:
    save(ROOT, tag, pieces(0, 1, scale), latest=False, disk=disk)


FORCED = ["sync_directory a", "sync X.index", "sync X.00000.safetensors", "sync_directory T", "sync X.index",
          "sync_directory T", "sync .manifest.json.X", "sync_directory T"]  # fmt: skip


def test_what_is_forced_in_which_order() -> None:
    disk = ModelDisk()
    small(disk, "one", 1.0)
    before = len(disk.calls)
    small(disk, "two", 2.0)
    calls = [re.sub("two", "T", re.sub(r"[0-9a-f]{16}", "X", call)) for call in disk.calls[before:]]
    assert [call for call in calls if call.startswith("sync")] == FORCED


@pytest.mark.matrix
@pytest.mark.parametrize("place", range(len(FORCED)))
def test_every_fsync_is_needed(place: int) -> None:
    """Each fsync left out alone, as if its line were deleted: some crash then loses what save() has returned."""
    lost = 0
    for second in ("two", "one"):
        count = 0
        while True:
            disk = Muted()
            small(disk, "one", 1.0)
            disk.skip(place)
            crashed = crash(disk, count, lambda disk=disk, tag=second: small(disk, tag, 2.0))  # type: ignore[misc]
            for entries in ENTRIES:
                after = disk.after_a_crash(entries)
                try:
                    lost += scale_of(after, second if not crashed else "one") != (2.0 if not crashed else 1.0) and (
                        not crashed or second == "two"
                    )
                except CheckpointError:
                    lost += 1
            count += 1
            if not crashed:
                break
    # 1: an empty file, by which ranks see that they share the directory. 3: of one machine the entry of the data is
    # forced with that of the index; of several each forces its own.
    assert bool(lost) == (place not in (1, 3))


class Muted(ModelDisk):
    """One of the calls that force something does nothing."""

    place = -1

    def skip(self, place: int) -> None:
        self.place = place

    def _call(self, what: str) -> None:
        super()._call(what)
        if what.startswith("sync"):
            self.mute = frozenset({"sync", "sync_directory"}) if self.place == 0 else frozenset()
            self.place -= 1


@pytest.mark.matrix
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("size", [1, 2])
def test_a_disk_that_fails_at_any_call_is_an_error_on_all_ranks_and_costs_nothing(size: int, number: int) -> None:
    disk = ModelDisk()
    saved(disk, "one", 1.0, size)
    total = len(disk.calls)
    saved(disk, "two", 2.0, size)
    total = len(disk.calls) - total
    for at in range(total):
        disk = ModelDisk()
        saved(disk, "one", 1.0, size)
        before = {str(path) for path, _ in disk.files()}
        disk.fail_at = len(disk.calls) + at, number
        failed = []

        def job(rank: int, disk: ModelDisk = disk, failed: list[int] = failed) -> None:
            try:
                save(ROOT, "two", pieces(rank, size, 2.0), comm=Communicator(), disk=disk)
            except CheckpointError as error:
                failed.append(rank if error.everywhere else -1)

        sim.run(size, job)
        disk.fail_at = None
        assert len(failed) in (0, size)
        if failed:
            scale = scale_of(disk)
            left = {str(path) for path, _ in disk.files()} - before
            assert scale in (1.0, 2.0)
            assert scale == 2.0 or not left or "manifest" in " ".join(left), left
        else:  # removing what a save replaced may fail, and nothing is lost by it
            assert scale_of(disk) == 2.0


def test_a_full_disk_leaves_nothing_behind() -> None:
    disk = ModelDisk()
    saved(disk, "one", 1.0)
    used = disk.used()
    disk.capacity = used + 1000
    with pytest.raises(CheckpointError, match="No space left"):
        saved(disk, "two", 2.0)
    assert disk.used() == used
    assert scale_of(disk) == 1.0
    assert disk.names(ROOT) == ["latest", "one"]


@pytest.mark.parametrize("entries", ENTRIES)
def test_a_replaced_file_is_the_old_one_or_the_new_one(entries: str) -> None:
    path, texts = Path("/latest"), []
    for at in range(10):
        disk = ModelDisk()
        put(disk, path, b"old")
        crashed = crash(disk, at, lambda disk=disk: put(disk, path, b"new"))  # type: ignore[misc]
        node = disk.after_a_crash(entries).top.now["latest"]
        texts.append(bytes(node.data))
        if not crashed:
            break
    assert texts[0] == b"old"
    assert texts[-1] == b"new"
    assert set(texts) == {b"old", b"new"}
