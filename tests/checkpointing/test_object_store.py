"""Checkpoints in object stores: fsspec's in memory, which several simulated ranks see."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpointing.test_checkpoints import pieces, value
from torch import nn
from typer.testing import CliRunner

from zoo import sim
from zoo.checkpointing import BackgroundSaver, CheckpointError, latest_tag, load, prune, save
from zoo.checkpointing.format.disk import place_of
from zoo.checkpointing.format.object_store import ObjectStore
from zoo.checkpointing.listing import DAMAGED, UNFINISHED, WHOLE, listing
from zoo.cli import app
from zoo.comm import Communicator
from zoo.engine import initialize

URL = "memory://bucket/runs"


class Bucket(MemoryFileSystem):
    """As a bucket is: an object is there when its upload has ended, and directories are not; may fail at some call."""

    protocol = "zoobucket"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fail_at = -1
    calls = 0

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        type(self).calls += 1
        if type(self).calls == type(self).fail_at:
            raise RuntimeError("503 slow down")  # stores raise what they like
        return super()._open(path, mode, **{**options, "autocommit": True} if "w" not in mode else options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        type(self).calls += 1
        if type(self).calls == type(self).fail_at:
            raise RuntimeError("503 slow down")
        super().pipe_file(path, value, **options)


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    fsspec.register_implementation("zoobucket", Bucket, clobber=True)
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    Bucket.store.clear()
    Bucket.pseudo_dirs[:] = [""]
    Bucket.fail_at, Bucket.calls = -1, 0


def write(url: str, size: int, tag: str = "one", scale: float = 1.0) -> None:
    def job(rank: int) -> None:
        own = {"rng": torch.full((4,), rank, dtype=torch.uint8)}
        save(url, tag, pieces(rank, size, scale), {"step/a": 3}, {"note": [1]}, Communicator(), rank_state=own)

    sim.run(size, job)


def check(url: str, tag: str | None = None, scale: float = 1.0) -> None:
    with load(url, tag) as found:
        for name, roles in found.roles.items():
            for role in roles:
                assert torch.equal(found.tensor(name, role).reshape(-1), value(name, role) * scale)
        assert (found.scalars, found.meta) == ({"step/a": 3}, {"note": [1]})
        assert found.rank_state(0)["rng"].tolist() == [0] * 4
        assert len(list(found.verify())) == found.world_size


@pytest.mark.parametrize("url", [URL, "zoobucket://bucket/runs/a", "memory://bucket/"])
def test_a_store_holds_checkpoints_as_a_directory_does(url: str) -> None:
    write(url, 3)
    check(url)
    write(url, 2, "two", 2.0)
    assert latest_tag(url) == "two"
    check(url, "one")
    check(url, None, 2.0)
    write(url, 2, "one", 3.0)  # replaced: nothing of the old one stays
    check(url, "one", 3.0)
    disk, root = place_of(url)
    assert len(disk.names(root / "one")) == 4
    assert [(one.tag, one.state, one.num_ranks) for one in listing(url)] == [("two", WHOLE, 2), ("one", WHOLE, 2)]
    assert all(one.saved_s for one in listing(url))
    assert prune(url, 1) == ["two"]
    assert disk.names(root) == ["latest", "one"]


@given(fail_at=st.integers(1, 14), size=st.integers(1, 2))
def test_a_store_that_refuses_leaves_the_checkpoint_before(fail_at: int, size: int) -> None:
    url = "zoobucket://bucket/runs"
    Bucket.store.clear()
    Bucket.fail_at = -1
    write(url, size)
    Bucket.calls = 0
    write(url, size, "else")
    calls = Bucket.calls
    Bucket.calls, Bucket.fail_at = 0, fail_at
    with pytest.raises(sim.RankError, match="503 slow") if fail_at <= calls else contextlib.nullcontext():
        write(url, size, "two", 2.0)
    Bucket.fail_at = -1
    found = {one.tag: one.state for one in listing(url)}
    assert found["one"] == WHOLE
    check(url, "one")
    if found.get("two") == WHOLE:
        check(url, "two", 2.0)
    else:
        assert found.get("two", UNFINISHED) == UNFINISHED


def test_damage_in_a_store_is_named_and_passed_over() -> None:
    write(URL, 2)
    write(URL, 2, "two")
    fs = fsspec.filesystem("memory")
    path = next(name for name in fs.find("/bucket/runs/two") if name.endswith("00001.safetensors"))
    content = fs.cat_file(path)
    fs.pipe_file(path, content[:-8])
    with pytest.raises(CheckpointError, match=r"00001\.safetensors has \d+ bytes; the index says"):
        load(URL, "two")
    assert load(URL).tag == "one"
    assert {one.tag: one.state for one in listing(URL)} == {"one": WHOLE, "two": DAMAGED}
    fs.pipe_file(path, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="have another CRC-32C"), load(URL, "two") as found:
        list(found.verify())
    fs.rm_file(path)
    with pytest.raises(CheckpointError, match="is missing from"):
        load(URL, "two")


def test_large_files_are_sent_and_read_in_parts() -> None:
    numel = 5 << 20
    tensor = torch.arange(numel, dtype=torch.float32)
    part = replace(pieces(0, 1)[0], name="big", role="parameter", start=0, length=numel, shape=(numel,), source=tensor)
    save(URL, "one", [part])
    with load(URL) as found:
        assert torch.equal(found.tensor("big"), tensor)
        assert torch.equal(found.read("big", "parameter", 3 << 20, 1000), tensor[3 << 20 :][:1000])


def test_a_save_in_the_background_goes_to_a_store() -> None:
    saver = BackgroundSaver(Communicator())
    state = pieces(0, 1)
    saver.save(URL, "one", state, {"step/a": 3}, {"note": [1]}, rank_state={"rng": torch.zeros(4, dtype=torch.uint8)})
    for item in state:
        item.tensor.zero_()
    check(URL)  # waits for it
    saver.close()


@pytest.mark.parametrize("copies", [True, False])
def test_a_store_copies_what_has_not_changed(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = MemoryFileSystem.cp_file

    def counted(self: Any, path: str, target: str, **options: Any) -> None:
        asked.append(target)
        if not copies:
            raise NotImplementedError
        plain(self, path, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "cp_file", counted)
    saver = BackgroundSaver(Communicator())
    for tag, scale in (("one", 1.0), ("two", 1.0), ("three", 2.0)):
        state = [replace(item, constant=item.role == "parameter") for item in pieces(0, 1, scale)]
        saver.save(URL, tag, state, {"step/a": 3}, {"note": [1]}, rank_state={"rng": torch.zeros(4)})
        saver.wait()
    assert ["/two/" in name for name in asked] == [True]
    for tag, scale in (("one", 1.0), ("two", 1.0), ("three", 2.0)):
        with load(URL, tag) as found:
            assert torch.equal(found.tensor("a").reshape(-1), value("a", "parameter") * scale)
            assert len(list(found.verify())) == 2
    saver.close()


def test_an_engine_trains_from_a_store(caplog: pytest.LogCaptureFixture) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    engine: Any = initialize(config, Loss())[0]
    batch = [torch.ones(2, 4)]
    engine.train_batch(iter(batch))
    with caplog.at_level(logging.WARNING):
        assert engine.save_checkpoint(URL, "a", {"note": 1}) == f"{URL}/a"
        losses = [float(engine.train_batch(iter(batch))) for _ in range(2)]
        path, client = engine.load_checkpoint(URL)
    assert (path.endswith("bucket/runs/a"), client) == (True, {"note": 1})
    assert [float(engine.train_batch(iter(batch))) for _ in range(2)] == losses
    assert "zero_to_fp32.py" in place_of(URL)[0].names(Path("/bucket/runs"))
    engine.destroy()


def test_the_command_line_takes_urls(tmp_path: Path) -> None:
    write(URL, 2)
    write(URL, 2, "two")
    runner = CliRunner()
    for arguments, said in (
        (["ls", URL], "two"), (["show", f"{URL}/one"], "parameter"), (["verify", URL], "two"),
        (["diff", f"{URL}/one", f"{URL}/two"], ""), (["export", f"{URL}/one", str(tmp_path / "x.safetensors")], ""),
        (["reshard", f"{URL}/one", "memory://bucket/other", "--ranks", "1"], ""),
        (["prune", URL, "--keep", "1"], "one"),
    ):  # fmt: skip
        found = runner.invoke(app, ["ckpt", *arguments])
        assert found.exit_code == 0, found.output
        assert said in found.output
    assert listing("memory://bucket/other")[0].num_ranks == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [("nothing://bucket/x", "Protocol not known: nothing"), ("gs://bucket/x", "gcsfs|google")],
)
def test_a_store_that_nobody_speaks_to_is_one_sentence(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"{url}.*cannot be opened: .*({said})"):
        load(url)


def test_file_urls_are_this_machine(tmp_path: Path) -> None:
    write(f"file://{tmp_path}", 2)
    check(str(tmp_path))


def test_what_is_no_object_is_no_file() -> None:
    disk = ObjectStore(fsspec.filesystem("memory"), "memory")
    write(URL, 1)
    with pytest.raises(OSError, match="not an object"):
        disk.open(Path("/bucket/runs"))
    with pytest.raises(FileNotFoundError):
        disk.open(Path("/bucket/nothing"))
    assert disk.names(Path("/bucket/nothing")) == []
    sink = disk.create(Path("/bucket/half"), 8)
    sink.write(torch.zeros(4, dtype=torch.uint8), 0)
    with pytest.raises(OSError, match="byte 6 after byte 4") as caught:
        sink.write(torch.zeros(2, dtype=torch.uint8), 6)
    assert caught.value.errno == errno.ESPIPE
    assert np.prod(MemoryFile().getvalue() == b"")
