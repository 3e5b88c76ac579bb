"""Checkpoints of others written as zoo's: every value, in pieces, recognised by what they are; and the command."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.checkpointing.foreign import mutants
from tests.checkpointing.foreign.test_deepspeed import GOLDEN, names
from typer.testing import CliRunner

from zoo.checkpointing import CheckpointError, load
from zoo.checkpointing.foreign import ForeignCheckpoint, import_checkpoint, open_foreign, recognise, training_meta
from zoo.checkpointing.foreign.pieces import BoxPart
from zoo.cli import app
from zoo.layout import Box

TENSORS = {
    "embed": torch.arange(12.0).view(4, 3), "layer.0.weight": torch.randn(3, 5).bfloat16(),
    "layer.0.ids": torch.arange(7), "scale": torch.tensor(2.5), "none": torch.empty(0, 3),
}  # fmt: skip


def ckpt(*args: object) -> Result:
    return CliRunner().invoke(app, ["ckpt", "import", *map(str, args)])


def sentence(result: Result) -> str:
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("zoo: ")
    return line


def golden(folder: Path, name: str) -> Path:
    """What DeepSpeed wrote, without what the tests keep beside it."""
    left_out = shutil.ignore_patterns("expected.safetensors", "losses.json")
    return Path(shutil.copytree(GOLDEN / name, folder / name, ignore=left_out))


def same(found: Any, expected: Any) -> None:
    """Every tensor in every role, and every number."""
    assert {n: dict(r) for n, r in found.roles.items()} == {n: dict(r) for n, r in expected.roles.items()}
    assert dict(found.scalars) == dict(expected.scalars)
    for name, roles in expected.roles.items():
        for role in roles:
            assert torch.equal(found.tensor(name, role), expected.tensor(name, role))


def gguf(path: Path) -> None:
    """Two tensors in fp32, and a vocabulary."""
    words = [f"word{k}".encode() for k in range(1500)]
    text = lambda raw: struct.pack("<Q", len(raw)) + raw  # noqa: E731
    values = text(b"tokens") + struct.pack("<IIQ", 9, 8, len(words)) + b"".join(map(text, words))
    tensors = text(b"a") + struct.pack("<IQIQ", 1, 4, 0, 0) + text(b"b") + struct.pack("<IQQIQ", 2, 3, 2, 0, 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 1) + values + tensors
    data = struct.pack("<4f", 1, 2, 3, 4) + bytes(16) + struct.pack("<6f", *range(6))
    path.write_bytes(head + bytes(-len(head) % 32) + data)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "tag"), [("stage1", None), ("stage3", None), ("stage2", "universal"), ("pipeline", None)]
)
def test_deepspeeds_become_zoos(tmp_path: Path, name: str, tag: str | None) -> None:
    source = golden(tmp_path, name)
    tmp_path = tmp_path / "new"
    result = ckpt(source, tmp_path, *(("--tag", tag) if tag else ()))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [str(tmp_path / (tag or "step"))]
    with load(tmp_path) as found:
        same(found, open_foreign(source, tag=tag))
        assert found.meta["client"] == {"note": [1, (2, "three")]}
        engine = found.meta["engine"]
        assert (engine["global_steps"], engine["samples"]) == (3, 12 if name == "pipeline" else 24)
        frozen = [] if name == "pipeline" else ["mixed.bias", "mixed.weight"]
        assert found.meta["model"]["frozen"] == frozen
    # The same by the folder of the tag.
    assert ckpt(source / (tag or "step"), tmp_path, "--name", "again").exit_code == 0
    with load(tmp_path, "again") as again, load(tmp_path, tag or "step") as found:
        same(again, found)
    assert "has 'again' already" in sentence(ckpt(source, tmp_path, "--name", "again"))


def test_stage_0_needs_its_groups_or_only_the_weights(tmp_path: Path) -> None:
    source, tmp_path = golden(tmp_path, "stage0"), tmp_path / "new"
    tmp_path.mkdir()
    assert "Give groups=" in sentence(ckpt(source, tmp_path))
    assert ckpt(source, tmp_path, "--weights-only", "--name", "weights").exit_code == 0
    with load(tmp_path) as found:
        assert found.roles["last.weight"] == {"parameter": "float32"}
    (tmp_path / "groups.json").write_text(json.dumps(names()))
    assert ckpt(source, tmp_path, "--groups", tmp_path / "groups.json").exit_code == 0
    with load(tmp_path) as found:
        same(found, open_foreign(source, groups=names()))
    (tmp_path / "groups.json").write_text('{"a": 1}')
    assert "a list for each group" in sentence(ckpt(source, tmp_path, "--groups", tmp_path / "groups.json"))


@pytest.mark.dear
def test_every_format_is_recognised_and_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "one.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    torch.save(TENSORS, tmp_path / "weights.pt")
    torch.save({"model": TENSORS, "epoch": 3}, tmp_path / "wrapped.bin")
    torch.save(TENSORS, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    sources = {"one.safetensors": "safetensors", "hf": "safetensors", "weights.pt": "torch", "wrapped.bin": "torch",
               "old.pth": "torch"}  # fmt: skip
    for number, (name, kind) in enumerate(sources.items()):
        assert recognise(tmp_path / name) == kind
        assert ckpt(tmp_path / name, tmp_path / "out", "--name", f"n{number}").exit_code == 0
        with load(tmp_path / "out", f"n{number}") as found:
            assert set(found.shapes) == set(TENSORS)
            assert all(torch.equal(found.tensor(key), value) for key, value in TENSORS.items())
            assert "engine" not in found.meta
    gguf(tmp_path / "model.gguf")
    assert ckpt(tmp_path / "model.gguf", tmp_path / "out").exit_code == 0
    with load(tmp_path / "out", "model") as found:
        assert found.tensor("b").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert found.meta["imported"]["metadata"]["tokens"] == "1500 values, left out"
    state = {f"model.{name}": tensor for name, tensor in TENSORS.items() if tensor.is_floating_point()}
    state |= {"optimizer.state.embed.exp_avg": torch.ones(4, 3), "optimizer.state.embed.step": torch.tensor(2.0)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert recognise(tmp_path / "dcp") == "dcp"
    assert ckpt(tmp_path / "dcp", tmp_path / "out").exit_code == 0
    with load(tmp_path / "out", "dcp") as found:
        same(found, open_foreign(tmp_path / "dcp"))
        assert (set(found.roles["embed"]), dict(found.scalars)) == ({"parameter", "exp_avg"}, {"step/embed": 2.0})
    assert ckpt(tmp_path / "dcp", tmp_path / "out", "--weights-only", "--name", "w").exit_code == 0
    with load(tmp_path / "out", "w") as found:
        assert {role for roles in found.roles.values() for role in roles} <= {"parameter", "buffer"}


@pytest.mark.dear
def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    assert "there is no file or folder" in sentence(ckpt(tmp_path / "nowhere", tmp_path / "out"))
    (tmp_path / "text").write_text("hello, this is no checkpoint")
    assert "is in no format that is known; formats are deepspeed" in sentence(ckpt(tmp_path / "text", tmp_path / "out"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is in no format that is known" in sentence(ckpt(empty, tmp_path / "out"))
    both = tmp_path / "both"
    golden(tmp_path, "stage1").rename(both)
    save_file(TENSORS, both / "model.safetensors")
    assert "could be in the formats deepspeed and safetensors" in sentence(ckpt(both, tmp_path / "out"))
    assert ckpt(both, tmp_path / "out", "--format", "safetensors").exit_code == 0
    assert "format 'onnx'; it is one of deepspeed, dcp" in sentence(ckpt(both, tmp_path, "--format", "onnx"))
    assert "key is for the format torch" in sentence(
        ckpt(GOLDEN / "stage1", tmp_path / "out", "--format", "deepspeed", "--key", "a")
    )
    assert "has checkpoints of zoo already" in sentence(ckpt(tmp_path / "out", tmp_path / "other"))
    torch.save({"a": TENSORS, "b": {"c": TENSORS}}, tmp_path / "deep.pt")
    assert "holds no state_dict of tensors, but the keys a, b; give the key" in sentence(
        ckpt(tmp_path / "deep.pt", tmp_path / "o")
    )
    assert "has no 'b.d'; at 'd' it has the keys c" in sentence(
        ckpt(tmp_path / "deep.pt", tmp_path / "o", "--key", "b.d")
    )
    assert ckpt(tmp_path / "deep.pt", tmp_path / "o", "--key", "b.c").exit_code == 0
    assert not (tmp_path / "other").exists()


def test_damage_leaves_no_checkpoint(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "one.safetensors")
    raw = (tmp_path / "one.safetensors").read_bytes()
    (tmp_path / "one.safetensors").write_bytes(raw[:-3])
    sentence(ckpt(tmp_path / "one.safetensors", tmp_path / "out"))
    with pytest.raises(CheckpointError):
        load(tmp_path / "out")


@given(st.data())
def test_tied_tensors_and_any_layout_of_a_torch_file(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5))
    state = {}
    for number, shape in enumerate(shapes):
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
        tensor = torch.randint(0, 2, tuple(shape)).to(dtype)
        state[f"t{number}"] = tensor.transpose(0, -1) if shape and data.draw(st.booleans()) else tensor
    state["tied"] = state["t0"]
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / "m.pt")
        import_checkpoint(open_foreign(Path(folder) / "m.pt"), folder, "new")
        with load(folder, "new") as found:
            tied = found.meta["model"]["tied"]
            assert set(found.shapes) | set(tied) == set(state)
            assert ("tied" in tied) == bool(state["t0"].numel())
            for name, value in state.items():
                assert torch.equal(found.tensor(tied.get(name, name)), value)


class Counting:
    """A large tensor that nobody has: counts what is read of it at once."""

    dtype, most = torch.float32, 0

    def __init__(self, shape: tuple[int, ...], base: int = 0) -> None:
        self.shape, self.numel, self.base = shape, Box.whole(shape).numel, base

    def read(self, start: int = 0, length: int | None = None) -> torch.Tensor:
        length = self.numel - start if length is None else length
        Counting.most = max(Counting.most, length)
        return (torch.arange(start, start + length) + self.base).float() % 1009


@pytest.mark.dear
def test_no_more_than_a_piece_is_in_memory(tmp_path: Path) -> None:
    rows, columns = 24_000, 1_000  # 96 MB in each of two tensors, one of them in rows on two ranks
    found = ForeignCheckpoint("big", tmp_path / "nowhere")
    found.add_whole("a", "parameter", Counting((rows, columns)))
    half = rows // 2
    parts = [BoxPart(Box((at, 0), (half, columns)), Counting((half, columns), at * columns)) for at in (half, 0)]
    found.add_boxes("b", "parameter", (rows, columns), parts, torch.float32)
    Counting.most = 0
    heard: list[int] = []
    tracemalloc.start()
    import_checkpoint(found, tmp_path, told=heard.append)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20  # of Python's own
    tracemalloc.stop()
    assert Counting.most * 4 <= 64 << 20
    assert sum(heard) == 2 * rows * columns * 4
    with load(tmp_path) as written:
        for name in ("a", "b"):
            assert torch.equal(
                written.read(name, "parameter", 11_999_990, 20), found.read("a", "parameter", 11_999_990, 20)
            )


@pytest.mark.hypothesis  # the property is inside
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "m.gguf"])
def test_mutants_of_any_format_are_refused_or_read(tmp_path: Path, name: str) -> None:
    file, mutated = tmp_path / name, tmp_path / "mutated"
    tensors = {"a": torch.ones(3, 2), "b": torch.arange(5)}
    write = {"m.pt": lambda: torch.save({"model": tensors, "step": 3}, file),
             "m.safetensors": lambda: save_file(tensors, file), "m.gguf": lambda: gguf(file)}  # fmt: skip
    write[name]()
    raw = file.read_bytes()

    def read(place: Path) -> None:
        found = open_foreign(place)
        training_meta(found)
        for key, roles in found.roles.items():
            for role in roles:
                found.tensor(key, role)

    @mutants.per_file()
    @given(mutants.edits)
    def check(changes: list[tuple[str, int, bytes]]) -> None:
        mutated.write_bytes(mutants.mutant(raw, changes))
        mutants.harmless(lambda: read(mutated), mutated.stat().st_size)

    read(file)
    check()
