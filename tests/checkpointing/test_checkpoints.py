"""Checkpoints: any layout to any layout, whole or not at all, and a sentence for each thing that can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.profiles import examples

from zoo import sim
from zoo.checkpointing import CheckpointError, MissingStateError, latest_tag, load, save
from zoo.checkpointing.disk import sha256_of
from zoo.comm import Communicator
from zoo.layout import Box, FlatLayout, LogicalTensor

SHAPES = {"a": (3, 5), "b|odd": (7,), "cube": (3, 4, 5), "empty": (0, 4), "scalar": ()}


@dataclass
class Piece:
    name: str
    role: str
    start: int
    length: int
    shape: tuple[int, ...]
    tensor: torch.Tensor


def value(name: str, role: str) -> torch.Tensor:
    numel = torch.Size(SHAPES[name]).numel()
    base = torch.arange(numel, dtype=torch.float32) + 100 * list(SHAPES).index(name)
    return base if role == "parameter" else -base.to(torch.bfloat16)


def pieces(rank: int, size: int, scale: float = 1.0, skip: int = 0) -> list[Piece]:
    layout = FlatLayout.pack((LogicalTensor(name=n, shape=s) for n, s in SHAPES.items()), multiple=size)
    found = []
    for part in layout.slices(*layout.shard_range(rank, size)):
        for role in ("parameter", "exp_avg"):
            tensor = value(part.name, role)[part.start : part.stop] * scale
            found.append(Piece(part.name, role, part.start, part.length, SHAPES[part.name], tensor))
    if rank == 0:
        found += [Piece("empty", role, 0, 0, (0, 4), value("empty", role)) for role in ("parameter", "exp_avg")]
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


# -- crashes ----------------------------------------------------------------------------------------------------------


class PowerLoss(BaseException):
    """Not an Exception: nothing may catch it, clean up and go on."""


STEPS = ("os.rename", "os.replace", "os.fsync", "os.open", "pathlib.Path.mkdir", "shutil.rmtree")


def _crash_at(monkeypatch: pytest.MonkeyPatch, count: int, after: bool) -> dict[str, int]:
    """Lose power at the ``count``-th of all calls of STEPS, before or after it took effect."""
    seen = {"calls": 0}

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            mine = seen["calls"]
            seen["calls"] += 1
            if mine == count and not after:
                raise PowerLoss
            result = real(*args, **kwargs)
            if mine == count:
                raise PowerLoss
            return result

        return step

    for owner, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (Path, "mkdir"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    return seen


@pytest.mark.parametrize("tag", ["two", "one"])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path, tag: str, after: bool) -> None:
    # One rank is enough: it does all the steps. "one" replaces the checkpoint that is there.
    outcomes = []
    for count in range(40):
        root = tmp_path / f"{tag}{after}{count}"
        save(root, "one", pieces(0, 1))
        with pytest.MonkeyPatch.context() as patch:
            _crash_at(patch, count, after)
            try:
                save(root, tag, pieces(0, 1, scale=2.0))
                finished = True
            except PowerLoss:
                finished = False
        scale = float(load(root).tensor("a")[0, 1])
        check_values(root, scale)
        outcomes.append(scale)
        # And saving goes on as if nothing had been.
        save(root, tag, pieces(0, 1, scale=3.0))
        check_values(root, 3.0)
        assert sorted(p.name for p in root.iterdir()) == sorted({"one", tag, "latest"})
        if finished:
            break
    assert finished
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1.0, 2.0}


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
            bad[0].tensor = bad[0].tensor[:-1]
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


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, "one", pieces(0, 1))
    assert not any(tmp_path.iterdir())


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
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_missing_and_doubled_elements_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"elements 0 to 14 of parameter 'a' .of 15. are missing"):
        save(tmp_path, "one", [*pieces(0, 1)[1:], Piece("a", "parameter", 15, 0, (3, 5), torch.zeros(0))])
    twice = [*pieces(0, 1), Piece("a", "parameter", 4, 2, (3, 5), torch.zeros(2))]
    with pytest.raises(
        CheckpointError, match="elements 4 to 5 of parameter 'a' are there twice: from rank 0 and from rank 0"
    ):
        save(tmp_path, "one", twice)
    long = [Piece("a", "parameter", 0, 16, (3, 5), torch.zeros(16))]
    with pytest.raises(CheckpointError, match=r"elements 15 to 15 of parameter 'a' .of 15. are too many"):
        save(tmp_path, "one", long)


def _edit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = root / "one" / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def _rewrite(root: Path, change: Callable[[dict[str, torch.Tensor]], None], rank: int = 1) -> None:
    """Change a file and make the manifest agree with it, as a careless tool would."""
    path = root / "one" / f"rank_{rank:05d}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    _edit(root, lambda d: d["files"][rank].update(size=path.stat().st_size, sha256=sha256_of(path)))


def _flip(root: Path) -> None:
    path = root / "one" / "rank_00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _first(tensors: dict[str, torch.Tensor]) -> str:
    return next(key for key in sorted(tensors) if key.startswith("parameter"))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit": (_flip, "rank_00001.safetensors has SHA-256"),
    "cut": (lambda r: os.truncate(r / "one" / "rank_00001.safetensors", 40), "rank_00001.safetensors has 40 bytes"),
    "gone": (lambda r: (r / "one" / "rank_00001.safetensors").unlink(), "rank_00001.safetensors is missing"),
    "extra": (lambda r: (r / "one" / "rank_00009.safetensors").touch(), "holds rank_00009.safetensors, which"),
    "no manifest": (lambda r: (r / "one" / "manifest.json").unlink(), "has no manifest.json"),
    "not json": (lambda r: (r / "one" / "manifest.json").write_text("{"), "cannot be read"),
    "no such tag": (lambda r: (r / "latest").write_text("zero"), "there is no checkpoint 'zero'.*it holds one"),
    "no latest": (lambda r: (r / "latest").unlink(), "no file 'latest'"),
    "format": (lambda r: _edit(r, lambda d: d.update(format="other")), "not a manifest"),
    "version": (lambda r: _edit(r, lambda d: d.update(version=99)), "version 99; this zoo reads"),
    "field": (lambda r: _edit(r, lambda d: d.pop("tensors")), "missing or of the wrong kind"),
    "escape": (lambda r: _edit(r, lambda d: d["files"][0].update(name="../../x")), "names the file '../../x'"),
    "absolute": (
        lambda r: _edit(r, lambda d: d["files"][0].update(name="/etc/passwd")),
        "names the file '/etc/passwd'",
    ),
    "fewer files": (lambda r: _edit(r, lambda d: d["files"].pop()), "is of 3 ranks and lists"),
    "shape": (
        lambda r: _edit(r, lambda d: d["tensors"][0].update(shape=[4, 5])),
        "elements 15 to 19 of .*'a'.*missing",
    ),
    "unknown": (lambda r: _edit(r, lambda d: d["tensors"].pop(0)), "'a', which the manifest does not know"),
    "dtype": (lambda r: _edit(r, lambda d: d["tensors"][0]["roles"].update(parameter="int64")), "float32 in the files"),
    "hole": (lambda r: _rewrite(r, lambda t: t.pop(_first(t))), "missing: no rank holds them"),
    "twice": (
        lambda r: _rewrite(r, lambda t: t.update({"parameter|a|0": torch.zeros(2)})),
        "elements 0 to 1 of parameter 'a' are there twice: from rank",
    ),
    "key": (lambda r: _rewrite(r, lambda t: t.update({"nonsense": torch.zeros(2)})), "the key 'nonsense'"),
    "number": (lambda r: _edit(r, lambda d: d["scalars"].update(x="y")), "the number 'x'"),
}


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path, 3)
    damage, said = DAMAGE[kind]
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path)

    def job(rank: int) -> bool:
        try:
            load(tmp_path, comm=Communicator())
        except CheckpointError as error:
            return error.everywhere
        return False

    assert sim.run(2, job) == [True, True]


def test_ranks_that_disagree_about_a_number_are_told(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        save(tmp_path, "one", pieces(rank, 2), {"step/a": rank}, comm=Communicator())

    with pytest.raises(sim.RankError, match="'step/a' is 1 on rank 1 and 0"):
        sim.run(2, job)
