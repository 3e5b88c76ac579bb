"""Manifests: how large they may be, which numbers they have, and how much of them is read."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpointing.manifests import rewrite
from tests.checkpointing.test_checkpoints import pieces, write

from zoo import sim
from zoo.checkpointing import BackgroundSaver, CheckpointError, load, prune, save, writing, zero_to_fp32
from zoo.checkpointing.format import manifest
from zoo.checkpointing.format.disk import LocalDisk
from zoo.checkpointing.format.exact import encode
from zoo.checkpointing.format.index import FileEntry, Index, State, empty_columns
from zoo.comm import Communicator
from zoo.layout import StateSlice


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("background", [False, True])
def test_meta_that_no_load_would_take_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, background: bool
) -> None:
    assert 0 < manifest.MOST_META_BYTES <= manifest.MOST_BYTES // 4
    monkeypatch.setattr(writing, "MOST_META_BYTES", 50_000)
    write(tmp_path, 1, "before")
    meta = {"client": {"ema": torch.zeros(20_000), "note": "x", "list": list(range(5_000)), "more": "y" * 600}}
    errors = []

    def job(rank: int) -> None:
        comm = Communicator()
        given = pieces(rank, size), {}, meta if rank == 0 else {}
        saver = BackgroundSaver(comm)
        try:
            if background:
                saver.save(tmp_path, "one", *given)
            else:
                save(tmp_path, "one", *given, comm)
        except CheckpointError as error:
            errors.append(str(error))
        finally:
            saver.close()

    sim.run(size, job)
    assert len(set(errors)) == 1
    assert len(errors) == size
    assert "a manifest takes 50,000 of it; the most are at meta.client.ema (1" in errors[0]
    assert "meta.client.list (" in errors[0]
    assert not (tmp_path / "one").exists()
    assert load(tmp_path).tag == "before"


def test_meta_has_the_size_that_was_measured_in_the_manifest(tmp_path: Path) -> None:
    """Whatever its depth: lines and spaces around nested values do not make it larger than what was allowed."""
    nested: list[object] = []
    for _ in range(200):
        nested = [nested, 1]
    meta = {"nested": nested, "numbers": [[[0] * 500] * 5] * 5, "text": 'é\n"\\\u2028', "float": math.inf}
    save(tmp_path, "one", pieces(0, 1), meta=meta)
    text = (tmp_path / "one" / "manifest.json").read_bytes()
    assert len(text) < len(json.dumps(encode(meta, "meta"))) + 2000
    assert load(tmp_path).meta == meta


@pytest.mark.matrix
@pytest.mark.parametrize("fields", [{}, {"attempt": "0" * 16}, {"attempt": "../x", "world_size": 1}])
@pytest.mark.parametrize("number", [2**62 - 1, 2**62, 2**80, -1, True, "7", None])
def test_a_stray_manifest_spoils_no_save(tmp_path: Path, fields: dict[str, object], number: object) -> None:
    write(tmp_path, 1, "good")
    stray = tmp_path / "stray"
    stray.mkdir()
    document = {"format": "zoo-checkpoint", "version": 3, "number": number, **fields}
    (stray / "manifest.json").write_text(json.dumps(document))
    if number == 2**62 - 1 and len(fields) == 1:
        with pytest.raises(CheckpointError, match=f"'stray' of .* has the number {number}, after which there is none"):
            write_again(tmp_path)
        assert load(tmp_path).tag == "good"
        shutil.rmtree(stray)
    write_again(tmp_path)
    found = load(tmp_path)
    assert (found.tag, float(found.tensor("a")[0, 1])) == ("good", 2.0)
    assert load(tmp_path, "good").tag == "good"


def write_again(root: Path) -> None:
    save(root, "good", pieces(0, 1, 2.0))


def test_what_no_load_takes_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, "good")
    monkeypatch.setattr(writing, "next_number", lambda disk, root: 2**62)
    with pytest.raises(CheckpointError, match=f"the manifest says number = {2**62}"):
        write_again(tmp_path)
    assert float(load(tmp_path).tensor("a")[0, 1]) == 1.0
    assert len(list((tmp_path / "good").iterdir())) == 3


class Counting(LocalDisk):
    """How many bytes of manifests are read."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def open(self, path: Path) -> Any:
        source = super().open(path)
        if path.name == "manifest.json":
            plain = source.read

            def read(memory: torch.Tensor, offset: int) -> int:
                self.num_bytes += memory.numel()
                return plain(memory, offset)

            source.read = read
        return source


def test_saving_and_loading_read_no_meta_of_other_checkpoints(tmp_path: Path) -> None:
    for number in range(6):
        save(tmp_path, f"s{number}", pieces(0, 1), meta={"long": "x" * 100_000})
    size = (tmp_path / "s0" / "manifest.json").stat().st_size
    for act in (
        lambda disk: save(tmp_path, "s5", pieces(0, 1), disk=disk),
        lambda disk: prune(tmp_path, 6, disk=disk, dry_run=True),
        lambda disk: load(tmp_path, disk=disk),
        lambda disk: (tmp_path / "latest").unlink(),
        lambda disk: load(tmp_path, disk=disk),
    ):
        disk = Counting()
        act(disk)
        assert disk.num_bytes < size, act


@pytest.mark.parametrize("reader", [load, zero_to_fp32.Checkpoint])
def test_an_index_whose_pieces_share_bytes_is_refused(tmp_path: Path, reader: Callable[[Path, str], object]) -> None:
    """Otherwise five megabytes on disk are a tensor of 64 GiB."""
    numel, count = 1 << 20, 16384
    save(tmp_path, "one", [StateSlice("a", "parameter", 0, numel, (numel,), torch.ones(numel))])
    _in_index(tmp_path, numel, count)
    with pytest.raises(ValueError, match=r"some of them are there twice|has some bytes of a file twice"):
        reader(tmp_path, "one")


@pytest.mark.parametrize("reader", [load, zero_to_fp32.Checkpoint])
def test_one_byte_too_many_is_seen_in_a_file_of_any_size(reader: Callable[[Path, str], object]) -> None:
    """Sums of floats would not: these files have 2**61 bytes, more than a float tells apart."""
    columns = empty_columns()
    halves = [1 << 60, (1 << 60) - 4096]
    for length, fits in ((4096, True), (4097, False)):
        rows = [*halves, length]
        columns |= {
            "state": np.zeros(3, "<i4"), "start": np.cumsum([0, *rows[:2]]).astype("<i8"),
            "length": np.array(rows, "<i8"), "file": np.zeros(3, "<i4"), "offset": np.zeros(3, "<i8"),
        }  # fmt: skip
        index = Index([State("a", "parameter", "uint8", (sum(rows),))], [], [FileEntry("x", 1 << 61)], columns)
        if reader is load:
            check = index.check
        else:
            script = object.__new__(zero_to_fp32.Checkpoint)
            script._files, script._columns, script._entries = {}, index.columns, [("x", 1 << 61, 0)]
            check = partial(script._check, [1])
        if fits:
            check()
        else:
            with pytest.raises(ValueError, match="twice"):
                check()


def _in_index(root: Path, length: int, count: int) -> None:
    """Pieces of so many elements, all at the bytes of the first one."""
    path = next((root / "one").glob("*.index"))
    index = Index.decode(path.read_bytes())
    first = int(index.columns["offset"][0])
    columns = index.columns | {
        "state": np.zeros(count, "<i4"), "start": np.arange(count, dtype="<i8") * length,
        "length": np.full(count, length, "<i8"), "file": np.zeros(count, "<i4"),
        "offset": np.full(count, first, "<i8"), "box": np.full(count, -1, "<i4"),
    }  # fmt: skip
    data = Index([State("a", "parameter", "float32", (count * length,))], [], index.files, columns).encode()
    path.write_bytes(data)
    rewrite(root / "one", lambda d: d["index"].update(size=len(data), sha256=hashlib.sha256(data).hexdigest()))
