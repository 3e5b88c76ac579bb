"""Models of others: safetensors folders as Hugging Face has them, and GGUF files."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.checkpointing.foreign import mutants

from zoo.checkpointing import CheckpointError, TensorFile
from zoo.checkpointing.foreign import ForeignCheckpoint, load_gguf, load_safetensors, write_safetensors
from zoo.layout import Box

TENSORS = {
    "embed": torch.arange(12.0).view(4, 3),
    "layer.0.weight": torch.randn(3, 5).bfloat16(),
    "layer.0.ids": torch.arange(7),
    "scale": torch.tensor(2.5),
    "none": torch.empty(0, 3),
}


def described(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def check(found: ForeignCheckpoint, tensors: dict[str, torch.Tensor]) -> None:
    assert set(found.shapes) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found.tensor(name), tensor)
        assert found.tensor(name).dtype is tensor.dtype


# -- safetensors ------------------------------------------------------------------------------------------------------


def test_no_file_of_another_model_is_taken_for_this_one(tmp_path: Path) -> None:
    def write(value: float, limit: int) -> None:
        tensors = {name: torch.full((4,), value) for name in ("a", "b")}
        write_safetensors(tmp_path, described(tensors), tensors.items(), max_shard_bytes=limit)
        assert float(load_safetensors(tmp_path).tensor("b")[0]) == value

    single, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    for value, limit in ((1.0, 32), (2.0, 16), (3.0, 16), (4.0, 32)):
        write(value, limit)
        assert (single.exists(), index.exists()) == (limit == 32, limit == 16)


def test_a_write_that_ends_between_two_shards_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: torch.zeros(4) for name in ("a", "b")}
    write_safetensors(tmp_path, described(tensors), tensors.items(), max_shard_bytes=16)
    commit, done = TensorFile.commit, []

    def once(file: TensorFile) -> None:
        done.append(file)
        if len(done) > 1:
            raise KeyboardInterrupt
        commit(file)

    monkeypatch.setattr(TensorFile, "commit", once)
    with pytest.raises(KeyboardInterrupt):
        write_safetensors(tmp_path, described(tensors), [(n, t + 1) for n, t in tensors.items()], max_shard_bytes=16)
    with pytest.raises(CheckpointError, match=r"has no model.safetensors.index.json and 2 files"):
        load_safetensors(tmp_path)


@given(st.integers(1, 200))
def test_shards_are_as_large_as_they_may_be_and_come_back(limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        items = list(TENSORS.items())
        files = write_safetensors(folder, described(TENSORS), reversed(items), max_shard_bytes=limit)
        check(load_safetensors(folder), TENSORS)
        theirs: dict[str, torch.Tensor] = {}
        for file in files:
            part = load_file(file)
            size = sum(t.nbytes for t in part.values())
            assert size <= limit or len([t for t in part.values() if t.nbytes]) == 1
            theirs |= part
        assert set(theirs) == set(TENSORS)
        if len(files) > 1:
            index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
            assert {Path(folder) / file for file in index["weight_map"].values()} == set(files)


def test_parts_are_read_without_the_rest(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    found = load_safetensors(tmp_path)
    assert found.read("embed", "parameter", 4, 3).tolist() == [4, 5, 6]
    assert torch.equal(found.read_box("embed", "parameter", Box((1, 1), (2, 2))), TENSORS["embed"][1:3, 1:])
    assert found.meta["metadata"] == {"format": "pt"}


def sharded(folder: Path) -> dict[str, Any]:
    write_safetensors(folder, described(TENSORS), TENSORS.items(), max_shard_bytes=100)
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return index


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 7, None, ".safetensors"]
)
def test_an_index_leads_out_of_its_folder_to_nothing(file: object, tmp_path: Path) -> None:
    index = sharded(tmp_path)
    index["weight_map"]["embed"] = file
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no file of its folder"):
        load_safetensors(tmp_path)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    place = tmp_path / "model.safetensors.index.json"
    names = sorted(set(index["weight_map"].values()))
    for changed, match in (
        ({**index["weight_map"], "more": names[0]}, "'more' is not in it"),
        ({k: v for k, v in index["weight_map"].items() if k != "embed"}, "embed"),
        ({**index["weight_map"], "embed": next(n for n in names if n != index["weight_map"]["embed"])}, "embed"),
    ):
        place.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(CheckpointError, match=match):
            load_safetensors(tmp_path)
    place.write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(CheckpointError, match="a key twice"):
        load_safetensors(tmp_path)
    place.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="no JSON"):
        load_safetensors(tmp_path)
    place.write_text(json.dumps(index))
    (tmp_path / names[0]).unlink()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        load_safetensors(tmp_path)


def header(entries: dict[str, Any] | str, data: int = 8) -> bytes:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"1234567", bytes(8), (2**62).to_bytes(8, "little") + b"{}", header("{"), header("[]", 0), header("{}", 1),
        header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}),
        header({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        header({"a": {"dtype": "XX", "shape": [2], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
        header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
               '"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
        header({"a": None}), header({"__metadata__": 3}, 0), header({"a": {"dtype": "F32", "shape": [True, 2]}}),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_the_file_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(raw)
    found = mutants.harmless(lambda: load_safetensors(tmp_path / "m.safetensors"), len(raw))
    assert isinstance(found, CheckpointError)


def test_links_of_the_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(TENSORS, tmp_path / "blobs" / "0a1b")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "0a1b")
    check(load_safetensors(tmp_path / "snapshot"), TENSORS)


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    for tensors, match in (
        (list(TENSORS.items())[:-1], "would lack 1 tensors"),
        ([("odd", torch.ones(1))], "not announced"),
        ([("embed", torch.ones(1))], "announced as"),
    ):
        with pytest.raises(CheckpointError, match=match):
            write_safetensors(tmp_path, described(TENSORS), tensors, max_shard_bytes=50)
        assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="max_shard_bytes=0"):
        write_safetensors(tmp_path, described(TENSORS), [], max_shard_bytes=0)


# -- GGUF -------------------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_file(tensors: list[tuple[str, tuple[int, ...], int, bytes]], values: bytes = b"", count: int = 0) -> bytes:
    """A file of (name, shape as torch has it, type, bytes)."""
    infos, data = b"", b""
    for name, shape, kind, raw in tensors:
        data += bytes(-len(data) % 32)
        sizes = b"".join(struct.pack("<Q", d) for d in reversed(shape))
        infos += text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, len(data))
        data += raw
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + values + infos
    return head + bytes(-len(head) % 32) + data


VALUES = (
    text("general.name") + struct.pack("<I", 8) + text("tiny") + text("n") + struct.pack("<Ii", 5, -3)
    + text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    + text("scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.5)
)  # fmt: skip


def test_plain_tensors_and_metadata_are_read(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    raw = gguf_file(
        [("x", (3, 4), 0, x.numpy().tobytes()), ("half", (5,), 1, np.arange(5, dtype="<f2").tobytes()),
         ("b", (2,), 30, torch.tensor([1.0, 2.0]).bfloat16().view(torch.uint8).numpy().tobytes())],
        VALUES, 4,
    )  # fmt: skip
    (tmp_path / "m.gguf").write_bytes(raw)
    found = load_gguf(tmp_path / "m.gguf")
    assert torch.equal(found.tensor("x"), x)
    assert found.tensor("half").tolist() == [0, 1, 2, 3, 4]
    assert found.tensor("b").dtype is torch.bfloat16
    said = found.meta["metadata"]
    assert (said["general.name"], said["n"], said["tokens"]) == ("tiny", -3, ["a", "bc"])
    assert said["scores"].tolist() == [0.5, 1.5]


QUANTISED = {
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q6_K": (14, 256, 210),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_blocks_are_the_numbers_that_the_package_gguf_makes_of_them(name: str, tmp_path: Path) -> None:
    quants = pytest.importorskip("gguf.quants")
    constants = pytest.importorskip("gguf.constants")
    kind, elements, size = QUANTISED[name]
    dice = np.random.default_rng(0)
    raw = dice.integers(0, 256, (6 * 3, size), dtype=np.uint8)
    for at in {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}[name]:
        raw[:, at : at + 2] = dice.normal(size=(18, 1)).astype("<f2").view(np.uint8)
    expected = quants.dequantize(raw, constants.GGMLQuantizationType(kind)).reshape(6, 3 * elements)
    (tmp_path / "m.gguf").write_bytes(gguf_file([("w", (6, 3 * elements), kind, raw.tobytes())]))
    found = load_gguf(tmp_path / "m.gguf")
    assert np.array_equal(found.tensor("w").numpy(), expected)
    assert found.roles["w"] == {"parameter": "float32"}
    part = found.read("w", "parameter", elements - 3, elements + 7)
    assert np.array_equal(part.numpy(), expected.reshape(-1)[elements - 3 : 2 * elements + 4])


def test_blocks_by_hand(tmp_path: Path) -> None:
    half = np.array([0.5], "<f2").tobytes()
    q8 = half + bytes(range(32))
    q4 = half + bytes([0x9F] * 16)  # low half 15, high half 9
    (tmp_path / "m.gguf").write_bytes(gguf_file([("q8", (32,), 8, q8), ("q4", (32,), 2, q4)]))
    found = load_gguf(tmp_path / "m.gguf")
    assert found.tensor("q8").tolist() == [i / 2 for i in range(32)]
    assert found.tensor("q4").tolist() == [3.5] * 16 + [0.5] * 16


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"GGUF", b"GGML" + bytes(40), b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(20),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 0, 2**61),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1) * 8 + bytes(40),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 77) + bytes(40),
        gguf_file([("a", (2**40,), 0, b"")]), gguf_file([("a", (2**40, 2**40), 0, b"")]),
        gguf_file([("a", (31,), 8, bytes(34))]), gguf_file([("a", (2**40 * 32,), 8, bytes(34))]),
        gguf_file([("a", (4,), 99, bytes(34))]),
        gguf_file([("a", (1,) * 9, 0, bytes(4))]), gguf_file([("a", (1,), 0, bytes(4)), ("a", (1,), 0, bytes(4))]),
        gguf_file([], text("n") + struct.pack("<Ii", 5, 1) + text("n") + struct.pack("<Ii", 5, 1), 2),
        gguf_file([], text("general.alignment") + struct.pack("<Ii", 5, 0), 1),
    ],
)  # fmt: skip
def test_counts_and_places_without_bytes_are_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(raw)
    found = mutants.harmless(lambda: load_gguf(tmp_path / "m.gguf"), len(raw))
    assert isinstance(found, CheckpointError)


# -- mutants ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "index"])
def test_mutants_are_refused_or_read(kind: str, tmp_path: Path) -> None:
    if kind == "index":
        sharded(tmp_path)
        file = tmp_path / "model.safetensors.index.json"
    elif kind == "gguf":
        file = tmp_path / "m.gguf"
        blocks = [("q8", (2, 32), 8, bytes(range(68))), ("x", (3,), 0, bytes(12)), ("k", (256,), 12, bytes(144))]
        file.write_bytes(gguf_file(blocks, VALUES, 4))
    else:
        file = tmp_path / "m.safetensors"
        save_file(TENSORS, file)
    raw = file.read_bytes()

    def read() -> None:
        found = load_gguf(file) if kind == "gguf" else load_safetensors(tmp_path if kind == "index" else file)
        for name in found.shapes:
            found.tensor(name)

    read()

    @mutants.per_file()
    @given(mutants.edits)
    def check(changes: list[tuple[str, int, bytes]]) -> None:
        file.write_bytes(mutants.mutant(raw, changes))
        mutants.harmless(read, len(raw))

    check()
