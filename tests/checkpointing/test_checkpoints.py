"""Checkpoints: any layout to any layout, whole or not at all, and a sentence for each thing that can be wrong."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpointing.manifests import rewrite
from tests.profiles import examples

from zoo import sim
from zoo.checkpointing import Checkpoint, CheckpointError, MissingStateError, latest_tag, load, prune, save
from zoo.checkpointing.format.data_files import AHEAD, CHUNK_BYTES
from zoo.checkpointing.format.disk import LocalDisk
from zoo.checkpointing.format.index import OF_PIECES, FileEntry, Index, State, empty_columns
from zoo.comm import Communicator
from zoo.layout import Box, FlatLayout, LogicalTensor, StateSlice

SHAPES = {"a": (3, 5), "b|odd": (7,), "cube": (3, 4, 5), "empty": (0, 4), "scalar": ()}


def value(name: str, role: str) -> torch.Tensor:
    numel = torch.Size(SHAPES[name]).numel()
    base = torch.arange(numel, dtype=torch.float32) + 100 * list(SHAPES).index(name)
    return base if role == "parameter" else -base.to(torch.bfloat16)


def pieces(rank: int, size: int, scale: float = 1.0, skip: int = 0) -> list[StateSlice]:
    layout = FlatLayout.pack((LogicalTensor(name=n, shape=s) for n, s in SHAPES.items()), multiple=size)
    found = []
    for part in layout.slices(*layout.shard_range(rank, size)):
        for role in ("parameter", "exp_avg"):
            tensor = value(part.name, role)[part.start : part.stop] * scale
            found.append(StateSlice(part.name, role, part.start, part.length, SHAPES[part.name], tensor))
    if rank == 0:
        found += [StateSlice("empty", role, 0, 0, (0, 4), value("empty", role)) for role in ("parameter", "exp_avg")]
    return found[skip:]


def write(root: Path, size: int, tag: str = "one", scale: float = 1.0) -> None:
    def job(rank: int) -> None:
        state = {"rng": torch.full((4,), rank, dtype=torch.uint8)}
        save(root, tag, pieces(rank, size, scale), {"step/a": 3}, {"note": [1]}, Communicator(), rank_state=state)

    sim.run(size, job)


def whole(root: Path, tag: str | None = None) -> dict[str, torch.Tensor]:
    found = load(root, tag)
    return {f"{role}/{name}": found.tensor(name, role) for name in found.shapes for role in found.roles[name]}


def check_values(root: Path, scale: float = 1.0, tag: str | None = None) -> None:
    for key, tensor in whole(root, tag).items():
        role, _, name = key.partition("/")
        assert tensor.shape == SHAPES[name]
        assert torch.equal(tensor.flatten(), value(name, role) * scale), key


@examples(times=2)
@given(st.integers(1, 5), st.integers(1, 5))
def test_any_number_of_ranks_reads_what_any_number_wrote(writers: int, readers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), writers)

        def job(rank: int) -> None:
            found = load(folder, comm=Communicator())
            for part in pieces(rank, readers):
                got = found.read(part.name, part.role, part.start, part.length)
                assert torch.equal(got, part.tensor)
                assert got.dtype == part.tensor.dtype
            assert found.scalars == {"step/a": 3}
            assert found.meta == {"note": [1]}
            state = found.rank_state(rank)
            assert state == {} if rank >= writers else int(state["rng"][0]) == rank

        sim.run(readers, job)


@examples(times=2)
@given(st.data())
def test_any_run_of_elements_can_be_read(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), 3)
        found = load(folder)
        for _ in range(10):
            name = data.draw(st.sampled_from(sorted(SHAPES)))
            numel = torch.Size(SHAPES[name]).numel()
            start = data.draw(st.integers(0, numel))
            length = data.draw(st.integers(0, numel - start))
            assert torch.equal(found.read(name, "parameter", start, length), value(name, "parameter")[start:][:length])


@examples(times=2)
@given(st.data())
def test_any_box_can_be_read(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), data.draw(st.integers(1, 4)))
        found = load(folder)
        for _ in range(10):
            name = data.draw(st.sampled_from(sorted(SHAPES)))
            ranges = [sorted(data.draw(st.tuples(st.integers(0, d), st.integers(0, d)))) for d in SHAPES[name]]
            box = Box(tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges))
            for role in ("parameter", "exp_avg"):
                got = found.read_box(name, role, box)
                expected = value(name, role).view(SHAPES[name])[(*(slice(low, high) for low, high in ranges), ...)]
                assert got.dtype == expected.dtype
                assert torch.equal(got, expected)


def test_what_is_not_there_is_a_key_error_and_a_value_error(tmp_path: Path) -> None:
    write(tmp_path, 2)
    found = load(tmp_path)
    for name, role in (("a", "momentum"), ("z", "parameter")):
        with pytest.raises(KeyError) as caught:
            found.read(name, role, 0, 1)
        assert isinstance(caught.value, MissingStateError)
        assert isinstance(caught.value, ValueError)
        assert str(caught.value).startswith("checkpoint 'one' has no")
    with pytest.raises(CheckpointError, match=r"\[10, 20\) lies outside"):
        found.read("a", "parameter", 10, 10)
    with pytest.raises(CheckpointError, match=r"box \[0:3, 4:6\] lies outside of parameter 'a'.*\(3, 5\)"):
        found.read_box("a", "parameter", Box((0, 4), (3, 2)))


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("at", range(3))
def test_a_rank_that_dies_while_saving_leaves_the_previous_checkpoint(tmp_path: Path, victim: int, at: int) -> None:
    write(tmp_path, 3)

    def job(rank: int) -> None:
        save(tmp_path, "two", pieces(rank, 3, 2.0), comm=Communicator())

    with pytest.raises(sim.RankError):
        sim.run(3, job, faults=[sim.Crash(rank=victim, at=at * 2)])
    scale = float(load(tmp_path).tensor("a")[0, 1])
    check_values(tmp_path, scale)


def test_a_rank_that_cannot_write_is_named_on_every_rank(tmp_path: Path) -> None:
    write(tmp_path, 3)

    def job(rank: int) -> str:
        bad = pieces(rank, 3)
        if rank == 1:
            bad[0] = replace(bad[0], source=bad[0].tensor[:-1])
        try:
            save(tmp_path, "two", bad, comm=Communicator())
        except CheckpointError as error:
            return f"{error.everywhere} {error}"
        return "saved"

    said = sim.run(3, job)
    assert len(set(said)) == 1
    assert str(said[0]).startswith("True ")
    assert "rank 1: the slice of parameter 'cube'" in str(said[0])
    assert latest_tag(tmp_path) == "one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "one"]


# -- what can be wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ("../up", "cannot be used"),
        ("a/b", "cannot be used"),
        ("", "cannot be used"),
        (".x", "cannot"),
        ("latest", "not"),
    ],
)
def test_tags_are_names(tmp_path: Path, tag: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        save(tmp_path, tag, pieces(0, 1))
    assert not any(tmp_path.iterdir())
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path, tag)


def test_missing_and_doubled_elements_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"elements 0 to 14 of parameter 'a' .of 15. are missing"):
        save(tmp_path, "one", [*pieces(0, 1)[1:], StateSlice("a", "parameter", 15, 0, (3, 5), torch.zeros(0))])
    twice = [*pieces(0, 1), StateSlice("a", "parameter", 4, 2, (3, 5), torch.zeros(2))]
    with pytest.raises(
        CheckpointError, match=r"elements 4 to 5 of parameter 'a' are there twice: in \w+.00000.safetensors and in"
    ):
        save(tmp_path, "one", twice)
    long = [StateSlice("a", "parameter", 0, 16, (3, 5), torch.zeros(16))]
    with pytest.raises(CheckpointError, match=r"elements 15 to 15 of parameter 'a' .of 15. are too many"):
        save(tmp_path, "one", long)


def _edit(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rewrite(root / "one", change)


def _index(root: Path) -> tuple[Path, Index]:
    path = next((root / "one").glob("*.index"))
    return path, Index._decode(path.read_bytes())


def _change(root: Path, change: Callable[[Index], object], *, raw: Callable[[bytes], bytes] = bytes) -> None:
    """Change the index and make the manifest agree with it, as a careless tool would."""
    path, index = _index(root)
    index.columns = {name: column.copy() for name, column in index.columns.items()}
    change(index)
    data = raw(index.encode())
    path.write_bytes(data)
    _edit(root, lambda d: d["index"].update(size=len(data), sha256=hashlib.sha256(data).hexdigest()))


def _data(root: Path, rank: int = 1) -> Path:
    return next((root / "one").glob(f"*.{rank:05d}.safetensors"))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _set(column: str, row: int, value: int) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        _change(root, lambda index: index.columns[column].__setitem__(row, value))

    return change


def _cut_row(root: Path) -> int:
    """The first piece of a tensor that has others."""
    states = _index(root)[1].columns["state"]
    return int(np.flatnonzero(states[1:] == states[:-1])[0])


def _without(root: Path, row: int) -> None:
    def change(index: Index) -> None:
        for name in OF_PIECES:
            index.columns[name] = np.delete(index.columns[name], row)

    _change(root, change)


def _state(root: Path, number: int, **change: Any) -> None:
    _change(root, lambda index: index.states.__setitem__(number, replace(index.states[number], **change)))


def _header(old: bytes, new: bytes) -> Callable[[Path], None]:
    def raw(data: bytes) -> bytes:
        size = int.from_bytes(data[8:16], "little")
        header = data[16 : 16 + size].replace(old, new).rstrip()
        header += b" " * (-len(header) % 8)
        return data[:8] + len(header).to_bytes(8, "little") + header + data[16 + size :]

    return lambda root: _change(root, lambda index: None, raw=raw)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda r: os.truncate(_data(r), 40), r"the file [0-9a-f]{16}.00001.safetensors has 40 bytes; the index"),
    "gone": (lambda r: _data(r).unlink(), r"the file [0-9a-f]{16}.00001.safetensors is missing"),
    "link": (lambda r: (_data(r).rename(r / "x"), _data(r, 0).with_name(_data(r, 0).name.replace("00000", "00001"))
                        .symlink_to(r / "x")), "00001.safetensors cannot be opened"),
    "no manifest": (lambda r: (r / "one" / "manifest.json").unlink(), "has no manifest.json"),
    "not json": (lambda r: (r / "one" / "manifest.json").write_text("{"), "cannot be read"),
    "format": (lambda r: _edit(r, lambda d: d.update(format="other")), "not a manifest"),
    "version": (lambda r: _edit(r, lambda d: d.update(version=99)), "version 99; this zoo reads"),
    "field": (lambda r: _edit(r, lambda d: d.pop("index")), "missing or of the wrong kind"),
    "escape": (lambda r: _edit(r, lambda d: d["index"].update(name="../../x")), "names the index '../../x'"),
    "absolute": (lambda r: _edit(r, lambda d: d["index"].update(name="/etc/passwd")), "names the index '/etc/passwd'"),
    "attempt": (lambda r: _edit(r, lambda d: d.update(attempt="../x")), r"the attempt '\.\./x'"),
    "ranks": (lambda r: _edit(r, lambda d: d.update(world_size=10**12)), "world_size = 1000000000000"),
    "size": (lambda r: _edit(r, lambda d: d["index"].update(size=-1)), "size of the index = -1"),
    "number": (lambda r: _edit(r, lambda d: d["scalars"].update(x="y")), "the number 'x'"),
    "index gone": (lambda r: _index(r)[0].unlink(), "the index .* cannot be read"),
    "index changed": (lambda r: _flip(_index(r)[0]), "has another SHA-256 than the manifest says"),
    "index grown": (lambda r: _index(r)[0].write_bytes(_index(r)[0].read_bytes() + b"x"), "bytes; at most"),
    "index cut": (lambda r: _change(r, lambda i: None, raw=lambda data: data[:-9]), "lies outside of it"),
    "no index": (lambda r: _change(r, lambda i: None, raw=lambda data: b"zooindex" + b"\xff" * 20), "cut off, or is"),
    "blocks": (_header(b'"block_bytes":1048576', b'"block_bytes":4096'), "blocks of 4096 bytes"),
    "deep": (_header(b'"files":[', b'"files":' + b"[" * 100_000), "cannot be read"),
    "columns": (_header(b'"start":[', b'"start":[9223372036854775807,0],"x":['), "'start' of the index lies outside"),
    "file name": (_header(b".00001.safetensors", b".00001.safetensorz"), "names the file '.*safetensorz'"),
    "shape": (lambda r: _change(r, lambda i: i.states.__setitem__(slice(None), [
        replace(s, shape=(4, 5)) if s.name == "a" else s for s in i.states])), "elements 15 to 19 of .*'a'.*missing"),
    "two shapes": (lambda r: _state(r, 0, shape=(99,)), "with two shapes"),
    "huge shape": (_header(b"[3,5]", b"[4611686018427387903,5]"), "the index has the shape"),
    "odd shape": (_header(b"[3,5]", b"[true,15]"), "True in the place of a size"),
    "negative shape": (_header(b"[3,5]", b"[-3,-5]"), "-3 in the place of a size"),
    "dtype": (lambda r: _state(r, 0, dtype="load"), "'load' is no dtype"),
    "doubled state": (lambda r: _change(r, lambda i: i.states.append(i.states[0])), "twice"),
    "hole": (lambda r: _without(r, 0), "missing: no rank holds them"),
    "twice": (lambda r: _set("length", _cut_row(r), int(_index(r)[1].columns["length"][_cut_row(r)]) + 1)(r),
              "there twice: in .* and in"),
    "state number": (_set("state", -1, 99), "a tensor or a file that it does not have"),
    "file number": (_set("file", 0, -1), "a tensor or a file that it does not have"),
    "offset": (_set("offset", 0, 1 << 40), "elements at byte 1099511627776 of"),
    "negative offset": (_set("offset", 0, -8), "elements at byte -8 of"),
    "length": (_set("length", 0, 1 << 61), "elements at byte"),
    "negative length": (_set("length", 0, -1), "elements at byte"),
    "negative start": (_set("start", 0, -1), "elements at byte|not sorted"),
    "sums": (lambda r: _change(r, lambda i: i.columns.update(sums=i.columns["sums"][:1])), "no checksums for all of"),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path, 3)
    damage, said = DAMAGE[kind]
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path, "one")

    def job(rank: int) -> bool:
        try:
            load(tmp_path, "one", comm=Communicator())
        except CheckpointError as error:
            return error.everywhere
        return False

    assert sim.run(2, job) == [True, True]


def _read_all(found: Checkpoint, rank: int) -> None:
    found.rank_state(rank)
    for name in found.shapes:
        found.tensor(name)


@pytest.mark.matrix
@pytest.mark.parametrize("rank", range(3))
def test_a_changed_bit_is_found_where_it_is_read(tmp_path: Path, rank: int) -> None:
    write(tmp_path, 3)
    path = _data(tmp_path, rank)
    good = path.read_bytes()
    first = 8 + int.from_bytes(good[:8], "little")
    for place in range(first, len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with load(tmp_path) as found, pytest.raises(CheckpointError, match=f"of the file {path.name} have another CRC"):
            list(found.verify())
    with load(tmp_path) as found, pytest.raises(CheckpointError, match="have another CRC-32C than the index says"):
        _read_all(found, rank)
    with load(tmp_path, verify=False) as found:
        found.rank_state(rank)
    path.write_bytes(good)
    with load(tmp_path) as found:
        assert [size for _, size in found.verify()] == [_data(tmp_path, r).stat().st_size for r in range(3)]


def test_blocks_are_read_once_each_whatever_is_asked_for(tmp_path: Path) -> None:
    """A tensor over several blocks, cut at odd places, and a file past the page cache."""
    numel = 5 * (1 << 20) // 2 + 77
    tensor = torch.arange(numel, dtype=torch.float32)
    large = torch.arange(4 * (1 << 20), dtype=torch.float32)
    save(tmp_path, "one", [StateSlice("t", "parameter", 0, numel, (numel,), tensor),
                           StateSlice("u", "parameter", 0, len(large), (len(large),), large)])  # fmt: skip
    with load(tmp_path) as found:
        assert torch.equal(found.tensor("t"), tensor)
        assert torch.equal(found.tensor("u"), large)
        for start, length in ((0, 1), (numel - 1, 1), (1 << 18, 1 << 18), ((1 << 18) - 3, 7), (5, numel - 9)):
            assert torch.equal(found.read("t", "parameter", start, length), tensor[start : start + length])


class Counting(LocalDisk):
    """What is read of each file."""

    def __init__(self) -> None:
        self.read: dict[str, int] = {}

    def open(self, path: Path) -> Any:
        source, disk = super().open(path), self
        plain, begin = source.read, source.begin

        def read(memory: torch.Tensor, offset: int) -> int:
            disk.read[path.name] = disk.read.get(path.name, 0) + memory.numel()
            return plain(memory, offset)

        def begun(memory: torch.Tensor, offset: int) -> Any:
            disk.read[path.name] = disk.read.get(path.name, 0) + memory.numel()
            return begin(memory, offset)

        source.read, source.begin = read, begun  # type: ignore[method-assign]
        return source


def test_several_streams_read_each_byte_once(tmp_path: Path) -> None:
    """As an optimizer loads: of each parameter its value and its moments, which are far from each other in the file."""
    numel, num = 100_003, 60
    roles = {"parameter": 0.0, "exp_avg": 1.0, "exp_avg_sq": 2.0}
    save(tmp_path, "one", [
        StateSlice(f"t{place:02d}", role, 0, numel, (numel,), torch.full((numel,), value + 3 * place))
        for place in range(num) for role, value in roles.items()
    ])  # fmt: skip
    disk = Counting()
    with load(tmp_path, disk=disk) as found:
        for place in range(num):
            for role, value in roles.items():
                for start, stop in ((0, numel // 3), (numel // 3, numel)):
                    part = found.read(f"t{place:02d}", role, start, stop - start)
                    assert bool((part == value + 3 * place).all())
    (name, size), *_ = [(path.name, path.stat().st_size) for path in (tmp_path / "one").glob("*.safetensors")]
    assert size > 60 << 20
    assert disk.read[name] <= size + 2 * AHEAD * CHUNK_BYTES  # read ahead of the ends of two streams


@pytest.mark.dear
def test_reading_in_any_order_gives_what_was_written(tmp_path: Path) -> None:
    """Jumps between many places of a large file, of which each begins to read ahead."""
    numel, num = 300_007, 120
    save(tmp_path, "one", [
        StateSlice(f"t{place}", "parameter", 0, numel, (numel,), torch.arange(numel) + place * 1000)
        for place in range(num)
    ])  # fmt: skip
    dice = random.Random(3)
    with load(tmp_path) as found:
        for _ in range(3):
            for place in dice.sample(range(num), num):
                start = dice.choice([0, 0, 7, 150_000])
                part = found.read(f"t{place}", "parameter", start, numel - start)
                assert torch.equal(part, torch.arange(start, numel) + place * 1000)


# -- tags, and the latest one ------------------------------------------------------------------------------------------


def test_latest_is_a_hint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for tag, scale in (("b", 1.0), ("a", 2.0), ("c", 3.0)):
        write(tmp_path, 2, tag, scale)
    assert load(tmp_path).tag == "c"
    (tmp_path / "latest").write_text("b")
    assert load(tmp_path).tag == "b"
    for text in ("gone", "../up", ""):
        (tmp_path / "latest").write_text(text)
        assert load(tmp_path).tag == "c"
    (tmp_path / "latest").unlink()
    assert load(tmp_path).tag == "c"
    (tmp_path / "c" / "manifest.json").write_text("{")
    check_values(tmp_path, 2.0)
    assert "the checkpoint" not in caplog.text or "is passed over" in caplog.text
    next((tmp_path / "a").glob("*.00001.safetensors")).unlink()
    assert sim.run(3, lambda rank: load(tmp_path, comm=Communicator()).tag) == ["b"] * 3
    assert "the latest checkpoint is passed over" in caplog.text
    with pytest.raises(CheckpointError, match="is missing"):
        load(tmp_path, "a")
    next((tmp_path / "b").glob("*.index")).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path)


def test_nothing_is_said_to_be_there_where_nothing_is(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="no file 'latest' and no checkpoints: nothing was saved there"):
            load(root)
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'zero'.*it holds one"):
        load(tmp_path, "zero")


def test_other_files_hurt_nobody(tmp_path: Path) -> None:
    write(tmp_path, 2)
    for name in ("notes.txt", "one/notes.txt", "one/0123456789abcdef.00000.safetensors", "one/.nfs0001", "two"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "folder").mkdir()
    check_values(tmp_path)
    write(tmp_path, 3, scale=2.0)
    check_values(tmp_path, 2.0)
    assert (tmp_path / "one" / "notes.txt").read_text() == "mine"
    assert prune(tmp_path, 1) == []
    assert (tmp_path / "one" / "0123456789abcdef.00000.safetensors").exists()


def test_a_save_that_is_not_to_be_the_latest(tmp_path: Path) -> None:
    save(tmp_path, "one", pieces(0, 1))
    save(tmp_path, "best", pieces(0, 1, 2.0), latest=False)
    assert load(tmp_path).tag == "one"
    check_values(tmp_path, 2.0, "best")


@pytest.mark.parametrize("tags", [("one", "one"), ("one", "two")])
def test_savers_of_one_directory_at_the_same_time_do_not_destroy_each_other(
    tmp_path: Path, tags: tuple[str, str]
) -> None:
    write(tmp_path, 1, "old")

    def saver(number: int) -> None:
        for _ in range(5):
            save(tmp_path, tags[number], pieces(0, 1, 2.0 + number))

    threads = [threading.Thread(target=saver, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        try:
            scale = float(load(tmp_path).tensor("a")[0, 1])
        except CheckpointError as error:  # it was replaced while it was read, and that is all that may be
            scale = 1.0 if "is missing" in str(error) or "was saved anew" in str(error) else -1.0
        assert scale in (1.0, 2.0, 3.0)
    for tag in set(tags):
        scale = float(load(tmp_path, tag).tensor("a")[0, 1])
        check_values(tmp_path, scale, tag)
        for found in load(tmp_path, tag).verify():
            assert found


def test_version_2_is_read(tmp_path: Path) -> None:
    golden = tmp_path / "version2"
    shutil.copytree(Path(__file__).parent / "golden" / "version2", golden)
    check_values(golden)

    def job(rank: int) -> None:
        found = load(golden, comm=Communicator())
        assert (found.tag, found.version, found.world_size) == ("one", 2, 3)
        assert found.scalars == {"step/a": 3}
        assert found.meta == {"note": [1]}
        assert found.rank_state(rank)["rng"].tolist() == [rank] * 4

    sim.run(2, job)
    path = golden / "one" / "rank_00001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors has SHA-256"):
        load(golden)
    assert load(golden, verify=False).tag == "one"
    _edit(golden, lambda d: d.update(world_size=10**9))
    with pytest.raises(CheckpointError, match="world_size = 1000000000"):
        load(golden)
    write(golden, 2, "one", 2.0)  # and replaced
    check_values(golden, 2.0)
    assert not path.exists()


def test_version_3_is_read(tmp_path: Path) -> None:
    golden = tmp_path / "version3"
    shutil.copytree(Path(__file__).parent / "golden" / "version3", golden)
    check_values(golden)
    found = load(golden)
    assert (found.tag, found.version, found.world_size, found.meta) == ("one", 3, 3, {"note": [1]})
    assert [found.rank_state(rank)["rng"].tolist() for rank in range(3)] == [[rank] * 4 for rank in range(3)]
    assert len(list(found.verify())) == 3
    old = set((golden / "one").iterdir())
    write(golden, 2, "one", 2.0)  # and replaced
    check_values(golden, 2.0)
    assert load(golden).version == 4
    assert not old & (set((golden / "one").iterdir()) - {golden / "one" / "manifest.json"})


def test_ranks_that_disagree_about_a_number_are_told(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        save(tmp_path, "one", pieces(rank, 2), {"step/a": rank}, comm=Communicator())

    with pytest.raises(sim.RankError, match="'step/a' is 1 on rank 1 and 0"):
        sim.run(2, job)


def test_a_million_pieces_are_checked_and_found_at_once() -> None:
    """One rank of 1,024: the index of 1,024 ranks with 1,000 pieces each, as bytes, checked, and asked."""
    ranks, tensors, numel = 1024, 1000, 1 << 20
    each = numel // ranks
    state = np.repeat(np.arange(tensors, dtype="<i4"), ranks)
    rank = np.tile(np.arange(ranks, dtype="<i4"), tensors)
    columns = {
        **empty_columns(), "state": state, "start": rank.astype("<i8") * each, "file": rank,
        "length": np.full(len(state), each, "<i8"), "offset": 4096 + state.astype("<i8") * each * 4,
    }  # fmt: skip
    files = [FileEntry(f"0123456789abcdef.{r:05d}.safetensors", 4096 + tensors * each * 4) for r in range(ranks)]
    states = [State(f"layer.{t}.weight", "parameter", "float32", (1024, 1024)) for t in range(tensors)]
    data = Index(states, [], files, columns).encode()
    began = time.process_time()
    found = Index.decode(data)
    rows = [row for t in range(tensors) for row in found.meeting(t, 5 * each - 1, 6 * each)]
    assert time.process_time() - began < 2.0
    assert len(rows) == 2 * tensors
    assert set(found.columns["file"][rows].tolist()) == {4, 5}
    assert len(data) < 33 * len(state)
