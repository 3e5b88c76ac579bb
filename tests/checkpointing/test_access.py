"""Who reads, and not what is read: permissions, descriptors, threads, forks, links; and what others do meanwhile."""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpointing.test_checkpoints import check_values, pieces, value, write
from tests.checkpointing.test_retention import one

from zoo import sim
from zoo.checkpointing import (
    BackgroundSaver,
    Checkpoint,
    CheckpointError,
    DamageError,
    TensorFile,
    load,
    reading,
    save,
    under_way,
)
from zoo.checkpointing.consolidation import write_script
from zoo.checkpointing.errors import UnreadableError
from zoo.checkpointing.format.disk import LARGE_BYTES, LOCAL, LocalDisk, put
from zoo.checkpointing.listing import listing
from zoo.checkpointing.resharding import reshard
from zoo.comm import Communicator
from zoo.layout import StateSlice


class Refusing(LocalDisk):
    """One file cannot be opened; ``names_of``: of which directory the names cannot be had after so many times."""

    def __init__(self, end: str, number: int) -> None:
        self.end, self.number, self.times = end, number, 0

    def open(self, path: Path) -> Any:
        if str(path).endswith(self.end):
            raise OSError(self.number, os.strerror(self.number), str(path))
        return super().open(path)


UNREADABLE = [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE]


@pytest.mark.parametrize("number", UNREADABLE)
@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_a_manifest_that_may_not_be_read_is_told_and_not_passed_over(
    tmp_path: Path, number: int, latest: bool, size: int
) -> None:
    for tag in ("one", "two"):
        one(tmp_path, tag)
    if not latest:
        (tmp_path / "latest").unlink()
    disk, found = Refusing("two/manifest.json", number), []

    def job(rank: int) -> None:
        for tag in (None, "two"):
            try:
                load(tmp_path, tag, Communicator(), disk=disk)
            except CheckpointError as error:
                found.append(str(error))

    sim.run(size, job)
    assert len(found) == 2 * size
    for text in found:
        assert "two/manifest.json' cannot be read: " + os.strerror(number) in text
        assert "never finished" not in text
    assert load(tmp_path, "one", disk=disk).tag == "one"
    assert [(one.tag, one.state) for one in listing(tmp_path, disk=disk)] == [("two", "unreadable"), ("one", "whole")]


@pytest.mark.matrix
@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("end", [".index", ".00001.safetensors"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_file_that_may_not_be_opened_is_no_damage(tmp_path: Path, number: int, end: str, size: int) -> None:
    write(tmp_path, 3, "one")
    write(tmp_path, 3, "two")
    attempt = next((tmp_path / "two").glob("*.index")).stem
    errors = []

    def job(rank: int) -> None:
        try:
            load(tmp_path, comm=Communicator(), disk=Refusing(attempt + end, number))
        except CheckpointError as error:
            errors.append((error.everywhere, str(error)))

    sim.run(size, job)
    assert len(errors) == size
    assert all(everywhere and os.strerror(number) in text for everywhere, text in errors)
    assert not any("missing" in text for _, text in errors)


def test_a_file_that_is_refused_later_is_no_damage(tmp_path: Path) -> None:
    write(tmp_path, 2)
    disk = Refusing("nothing", errno.EACCES)
    with load(tmp_path, disk=disk) as found:
        disk.end = ".safetensors"
        with pytest.raises(UnreadableError, match="cannot be opened: Permission denied"):
            found.tensor("a")
        disk.end = "nothing"
        assert torch.equal(found.tensor("a").flatten(), value("a", "parameter"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def of_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reading, "_MOST_OPEN", 4)
    save(tmp_path / "few", "one", [StateSlice("w", "parameter", 0, 999, (999,), torch.arange(999.0))])
    with load(tmp_path / "few") as found:
        reshard(found, tmp_path / "many", 60)
    return tmp_path / "many"


def test_a_few_files_are_open_at_once(of_many_files: Path) -> None:
    with load(of_many_files) as found:
        before = descriptors()
        for _ in range(2):
            assert torch.equal(found.tensor("w"), torch.arange(999.0))
            assert len(list(found.verify())) == 60
            assert descriptors() <= before + 4
    assert descriptors() == before


def test_where_no_file_can_be_opened_any_more_others_are_closed_first(of_many_files: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with load(of_many_files) as found:
        found.read("w", "parameter", 0, 1)
        kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(kept) + 1, hard))
            with pytest.raises(OSError, match="Too many open files"):
                os.open("/dev/null", os.O_RDONLY)
            assert float(found.read("w", "parameter", 998, 1)) == 998.0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for number in kept:
                os.close(number)


LARGE = 6_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of 16 MB."""
    root = tmp_path_factory.mktemp("large")
    every = torch.arange(LARGE, dtype=torch.float64)

    def job(rank: int) -> None:
        start, stop = rank * LARGE // 3, (rank + 1) * LARGE // 3
        save(
            root,
            "one",
            [StateSlice("w", "parameter", start, stop - start, (LARGE,), every[start:stop])],
            comm=Communicator(),
        )

    sim.run(3, job)
    return root


def test_files_of_one_checkpoint_share_one_engine(large: Path) -> None:
    tasks = lambda: len(os.listdir("/proc/self/task"))  # noqa: E731
    with load(large) as found:
        found.read("w", "parameter", 0, LARGE // 3)
        one_file = tasks()
        assert torch.equal(found.tensor("w"), torch.arange(LARGE, dtype=torch.float64))
        assert tasks() <= one_file
        assert len(found._files) == 3


def test_where_there_is_no_room_for_an_engine_plain_calls_read(
    large: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import zoo.io

    def none(**given: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(zoo.io, "Handle", none)
    with load(large) as found:
        assert torch.equal(found.tensor("w"), torch.arange(LARGE, dtype=torch.float64))
    assert "is read by plain calls, not past the page cache" in caplog.text


def test_what_several_transfers_failed_of_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failure is told by who waits for it; those that nobody asks for come out of the engine's end."""
    import zoo.io

    make, broken = zoo.io.Handle, zoo.io.Mock(faults=(zoo.io.Fault(error="EIO"),))
    monkeypatch.setattr(zoo.io, "Handle", lambda **given: make(**given, backend=broken))
    memory = torch.zeros(4096, dtype=torch.uint8)
    sink = LOCAL.create(tmp_path / "f", LARGE_BYTES)
    for k in range(3):
        sink.write(memory, 4096 * k)
    with pytest.raises(OSError, match="errno 5"):
        sink.sync()
    sink.close()
    os.truncate(tmp_path / "f", 1 << 16)
    source = LOCAL.open(tmp_path / "f")
    waits = [source.begin(memory, 4096 * k) for k in range(3)]
    with pytest.raises(OSError, match="errno 5"):
        waits[0]()
    source.close()
    del waits  # a future has its file
    fds = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    assert [fd for fd in fds if fd.exists() and fd.samefile(tmp_path / "f")] == []


def test_several_threads_read_one_checkpoint(large: Path) -> None:
    def job(seed: int) -> int:
        dice, wrong = torch.Generator().manual_seed(seed), 0
        for _ in range(25):
            start, length = (int(torch.randint(high, (1,), generator=dice)) for high in (LARGE - 300_000, 300_000))
            got = found.read("w", "parameter", start, length)
            wrong += not torch.equal(got, torch.arange(start, start + length, dtype=torch.float64))
        return wrong

    with load(large) as found, ThreadPoolExecutor(4) as threads:
        assert list(threads.map(job, range(4))) == [0] * 4


@pytest.mark.parametrize("version", [2, 4])
def test_verify_compares_what_was_opened_without(tmp_path: Path, version: int) -> None:
    if version == 4:
        write(tmp_path, 2)
    else:
        import shutil

        shutil.copytree(Path(__file__).parent / "golden" / "version2", tmp_path, dirs_exist_ok=True)
    path = sorted((tmp_path / "one").glob("*.safetensors"))[1]
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    with load(tmp_path, "one", verify=False) as found:
        for name in found.shapes:
            found.tensor(name)  # what was read and not compared is not taken for compared
        with pytest.raises(CheckpointError, match=path.name):
            list(found.verify())


# -- saves of this process --------------------------------------------------------------------------------------------


class Waiting(LocalDisk):
    """A save that goes on when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def create(self, path: Path, num_bytes: int) -> Any:
        self.go.wait(30)
        return super().create(path, num_bytes)


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[tuple[Path, Waiting]]:
    """A directory where "one" is, and a save of "two" is under way."""
    root, disk = tmp_path / "runs", Waiting()
    one(root, "one")
    saver = BackgroundSaver(Communicator())
    saver.save(root, "two", [StateSlice("w", "parameter", 0, 1, (1,), torch.ones(1))], disk=disk)
    yield root, disk
    disk.go.set()
    saver.close()


def test_by_another_path_load_waits_for_the_save_that_is_under_way(saving: tuple[Path, Waiting]) -> None:
    root, disk = saving
    (root.parent / "current").symlink_to(root)
    threading.Timer(0.2, disk.go.set).start()
    assert load(root.parent / "current").tag == "two"


def test_a_child_waits_for_no_save_of_its_parent(saving: tuple[Path, Waiting]) -> None:
    root, _ = saving
    with under_way._lock:  # a thread may have it at that moment
        child = os.fork()
    if child == 0:
        try:
            os._exit(0 if load(root).tag == "one" else 1)
        except BaseException:
            os._exit(2)
    began = time.monotonic()
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < began + 20:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)


# -- temporary files --------------------------------------------------------------------------------------------------


def test_what_is_written_beside_goes_through_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (".zero_to_fp32.py.writing", ".latest.writing", ".writing-m.safetensors", ".m.safetensors.writing"):
        (tmp_path / name).symlink_to(victim)
    before = set(os.listdir(tmp_path))
    write_script(tmp_path)
    put(LOCAL, tmp_path / "latest", b"x")
    with TensorFile(tmp_path / "m.safetensors", {"a": (torch.float32, (1,))}, {}) as file:
        file.put("a", torch.ones(1))
        file.commit()
    assert victim.read_text() == "precious"
    assert set(os.listdir(tmp_path)) - before == {"zero_to_fp32.py", "latest", "m.safetensors"}
    assert not any((tmp_path / name).is_symlink() for name in ("zero_to_fp32.py", "latest", "m.safetensors"))
    with pytest.raises(FileExistsError):
        LOCAL.create(tmp_path / ".latest.writing", 1)


def test_several_write_one_file(tmp_path: Path) -> None:
    files = [TensorFile(tmp_path / "m.safetensors", {"a": (torch.float32, (4,))}, {}) for _ in range(2)]
    for number, file in enumerate(files):
        file.put("a", torch.full((4,), float(number)))
    for file in files:
        file.commit()
    assert os.listdir(tmp_path) == ["m.safetensors"]
    barrier = threading.Barrier(4)

    def script(_: int) -> None:
        barrier.wait()
        write_script(tmp_path)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            (tmp_path / "zero_to_fp32.py").unlink(missing_ok=True)
            list(threads.map(script, range(4)))
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "zero_to_fp32.py"]


# -- ranks that agree -------------------------------------------------------------------------------------------------


def told(size: int, job: Callable[[int], object]) -> list[str]:
    """What each rank raises."""
    found: list[str] = [""] * size

    def guarded(rank: int) -> None:
        try:
            job(rank)
        except CheckpointError as error:
            found[rank] = str(error)

    sim.run(size, guarded)
    return found


@pytest.mark.parametrize("there", [True, False])
def test_ranks_that_save_to_different_directories_are_told(tmp_path: Path, there: bool) -> None:
    def job(rank: int) -> None:
        mine = tmp_path / f"rank{rank}"
        if there:
            (mine / "one").mkdir(parents=True, exist_ok=True)
        save(mine, "one", pieces(rank, 2), comm=Communicator())

    first, second = told(2, job)
    assert first == second
    assert f"rank 1: what rank 0 has made in '{tmp_path}/rank0' is not in '{tmp_path}/rank1' here" in first
    assert f"in '{tmp_path}/rank0' failed" in first
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_one_directory_of_two_names_is_one(tmp_path: Path) -> None:
    (tmp_path / "mounted").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    paths = [tmp_path / "real", tmp_path / "mounted"]
    sim.run(2, lambda rank: save(paths[rank], "one", pieces(rank, 2), comm=Communicator()))
    check_values(tmp_path / "real")


@pytest.mark.parametrize("tags", [("one", "two"), (None, "one"), ("one", None)])
@pytest.mark.parametrize("whole", [True, False])
def test_ranks_that_ask_for_different_checkpoints_are_told(
    tmp_path: Path, tags: tuple[str | None, str | None], whole: bool
) -> None:
    for tag in ("two", "one"):
        write(tmp_path, 2, tag)
    if not whole:
        next((tmp_path / "one").glob("*.00001.safetensors")).unlink()
    first, second = told(2, lambda rank: load(tmp_path, tags[rank], Communicator()))
    assert first == second
    assert f"rank 1: the tag {tags[1]!r} is asked for here and {tags[0]!r} on rank 0" in first


def test_what_rank_0_raises_between_two_steps_of_load_is_told_to_all(tmp_path: Path) -> None:
    for tag in "ab":
        one(tmp_path, tag)
    next((tmp_path / "b").glob("*.safetensors")).unlink()

    class Stale(LocalDisk):
        def names(self, path: Path) -> list[str]:
            if path == tmp_path:
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return super().names(path)

    first, second = told(2, lambda rank: load(tmp_path, comm=Communicator(), disk=Stale()))
    assert first == second
    assert "Stale file handle" in first


# -- a tag that is saved anew -----------------------------------------------------------------------------------------


class Anew(LocalDisk):
    """A tag is saved anew before one of its files is opened."""

    def __init__(self, what: Callable[[], object], times: int = 1) -> None:
        self.what, self.times = what, times

    def open(self, path: Path) -> Any:
        if path.suffix == ".safetensors" and self.times:
            self.times -= 1
            self.what()
        return super().open(path)


@pytest.mark.parametrize("tag", ["last", None])
@pytest.mark.parametrize("times", [1, 3])
def test_a_checkpoint_that_is_saved_anew_while_it_is_opened_is_opened_again(
    tmp_path: Path, tag: str | None, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    one(tmp_path, "old", 0.0)
    one(tmp_path, "last", 1.0)
    with load(tmp_path, tag, disk=Anew(lambda: one(tmp_path, "last", 2.0), times)) as found:
        assert found.tag == "last"
        assert float(found.tensor("w")) == 2.0
    assert "was saved anew, and is opened again" in caplog.text


def test_one_that_is_saved_anew_after_it_was_opened_is_not_skipped(tmp_path: Path) -> None:
    """What an engine does: it reads, finds that a file has gone, and asks for another checkpoint than this one."""
    one(tmp_path, "old", 0.0)
    one(tmp_path, "last", 1.0)
    found = load(tmp_path)
    one(tmp_path, "last", 2.0)
    with pytest.raises(DamageError, match=r"'last' was saved anew after it was opened, .* load it again"):
        found.tensor("w")
    again = load(tmp_path, skip=["last"])
    assert (again.tag, float(again.tensor("w"))) == ("last", 2.0)
    path = next((tmp_path / "last").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DamageError, match="CRC-32C"):
        load(tmp_path).tensor("w")
    assert load(tmp_path, skip=["last"]).tag == "old"


def test_closing_twice_and_reading_again(tmp_path: Path) -> None:
    write(tmp_path, 2)
    found: Checkpoint = load(tmp_path)
    for _ in range(2):
        assert torch.equal(found.tensor("a").flatten(), value("a", "parameter"))
        found.close()
        found.close()
