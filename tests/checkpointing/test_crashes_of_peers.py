"""Crashes between recorded system calls, on the disk of the durability tests: of zoo, and of DCP for comparison."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from benchmarks.checkpointing.crashes import ENTRIES, KILLED, TAGS, crash, events_of, examine

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace records the system calls")


@pytest.mark.slow
@needs_strace
@pytest.mark.parametrize("tag", TAGS)
def test_no_crash_of_a_save_of_zoo_costs_a_checkpoint(tmp_path: Path, tag: str) -> None:
    found = examine("zoo", tag, tmp_path)
    assert found.calls > 15
    assert found.bad("refused") == found.bad("half") == 0
    assert not found.lost_when_returned
    assert all(counts["old"] and counts["new"] for counts in found.counts.values())


@pytest.mark.slow
@needs_strace
def test_some_crash_of_a_save_of_dcp_costs_one(tmp_path: Path) -> None:
    """So that the test above can fail: it forces files, and no directory."""
    found = examine("DCP", "one", tmp_path)
    assert found.calls > 10
    assert found.bad("refused") + found.bad("half") > 0


LOG = r"""
7 mkdir("\x2f\x72\x2f\x61", 0777) = 0
7 openat(AT_FDCWD<\x2f>, "\x2f\x72\x2f\x61\x2f\x66", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 5<\x2f\x72\x2f\x61\x2f\x66>
7 write(5<\x2f\x72\x2f\x61\x2f\x66>, "\x61\x62", 2) = 2
8 write(5<\x2f\x72\x2f\x61\x2f\x66>, "\x63\x64" <unfinished ...>
7 write(1<pipe:[3]>, "\x78", 1) = 1
8 <... write resumed>, 2) = 1
7 writev(5<\x2f\x72\x2f\x61\x2f\x66>, [{iov_base="\x65", iov_len=1}, {iov_base="\x66", iov_len=1}], 2) = 2
7 pwrite64(5<\x2f\x72\x2f\x61\x2f\x66>, "\x41", 1, 0) = 1
7 mkdir("\x2f\x72\x2e\x62\x65\x74\x77\x65\x65\x6e", 0777) = 0
7 fsync(5<\x2f\x72\x2f\x61\x2f\x66>) = 0
7 openat(AT_FDCWD<\x2f>, "\x2f\x72\x2f\x67", O_RDONLY) = -1 ENOENT (No such file or directory)
7 rename("\x2f\x72\x2f\x61\x2f\x66", "\x2f\x72\x2f\x61\x2f\x67") = 0
""".strip()


def test_calls_are_read_as_they_were_made() -> None:
    path = "/r/a/f"
    first = [("mkdir", "/r/a"), ("create", path), ("write", path, 0, b"ab"), ("write", path, 2, b"c"),
             ("write", path, 3, b"ef"), ("write", path, 0, b"A")]  # fmt: skip
    second = [("sync", path), ("rename", path, "/r/a/g")]
    assert list(events_of(LOG, "/r")) == [*first, ("mark", "between"), *second]


def test_what_was_not_forced_is_lost() -> None:
    first = [("mkdir", "/r/a")]
    second = [("create", "/r/a/f"), ("write", "/r/a/f", 0, b"ab"), ("sync", "/r/a/f"), ("sync", "/r/a")]
    left = {(done, way): files for done, way, files in crash(first, second, "/r")}
    whole = {"a/f": b"ab"}
    assert {way: left[4, way] for way in (*ENTRIES, KILLED)} == dict.fromkeys((*ENTRIES, KILLED), whole)
    assert left[3, "kept"] == {}
    assert left[3, "now"] == whole
    assert left[2, "now"] == {"a/f": b""}
    assert left[2, KILLED] == whole
    assert left[0, KILLED] == {}
