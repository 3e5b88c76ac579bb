"""The script that needs torch and numpy alone: what it reads and writes, and prepared checkpoints."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpointing.manifests import rewrite
from tests.checkpointing.test_consolidation import Values, expected, model_values, put, same
from tests.profiles import examples

from zoo.checkpointing import CheckpointError, load, zero_to_fp32
from zoo.checkpointing.consolidation import (
    get_fp32_state_dict_from_zero_checkpoint,
    write_script,
)
from zoo.checkpointing.zero_to_fp32 import Checkpoint, crc32c, tensors_of
from zoo.io import crc32c as native_crc32c


def test_the_script_is_put_beside_checkpoints_and_other_files_stay(tmp_path: Path) -> None:
    path = write_script(tmp_path)
    source = Path(zero_to_fp32.__file__).read_bytes()
    assert path == tmp_path / "zero_to_fp32.py"
    assert path.read_bytes() == source
    before = path.stat().st_mtime_ns
    assert write_script(tmp_path) == path
    assert path.stat().st_mtime_ns == before
    path.write_bytes(source[:200])  # an older one
    assert write_script(tmp_path) == path
    assert path.read_bytes() == source
    path.write_text("print('mine')")
    assert write_script(tmp_path) is None
    assert path.read_text() == "print('mine')"
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert write_script(tmp_path) is None
    assert path.is_symlink()


@pytest.mark.dear
@pytest.mark.long
def test_the_script_needs_torch_and_numpy_alone(tmp_path: Path) -> None:
    values = model_values()
    put(tmp_path, values)
    script = write_script(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    # Without site nothing that is installed as a path is found; the packages beside torch are made unimportable.
    code = (
        "import runpy, sys, importlib.util; "
        "assert importlib.util.find_spec('zoo') is None; "
        "sys.modules.update(dict.fromkeys(('zoo', 'safetensors', 'pydantic', 'rich', 'typer'))); "
        f"sys.argv = ['zero_to_fp32.py', '..', 'out.bin', '--tag', 'one']; "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    places = dict.fromkeys(str(Path(module.__file__).parents[1]) for module in (torch, np) if module.__file__)
    environment = {"PYTHONPATH": os.pathsep.join(places), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'elsewhere' / 'out.bin'}\n"
    same(torch.load(tmp_path / "elsewhere" / "out.bin", weights_only=True), expected(values))


def test_the_scripts_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "run", model_values())
    run = [str(tmp_path / "run")]
    main = zero_to_fp32.main
    assert main([*run, str(tmp_path / "a"), "--safe_serialization", "--max_shard_size", "1KB"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main([*run, str(tmp_path / "b"), "--exclude_frozen_parameters", "-d"]) == 0
    found = torch.load(tmp_path / "b" / "pytorch_model.bin", weights_only=True)
    assert set(found) == {"w", "mean", "count"}
    assert main([*run, str(tmp_path / "c.bin"), "--safe_serialization"]) == 2
    assert main(["nowhere", str(tmp_path / "c.bin")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("zero_to_fp32: ") for line in said[-2:])
    data = next((tmp_path / "run" / "one").glob("*.00000.safetensors"))
    raw = bytearray(data.read_bytes())
    raw[-9] ^= 1
    data.write_bytes(raw)
    assert main([*run, str(tmp_path / "c.bin")]) == 2
    assert "has another CRC-32C than the index says" in capsys.readouterr().err
    assert main([*run, str(tmp_path / "c.bin"), "--no_verify"]) == 0


@given(st.data())
@examples(times=1)
def test_the_script_reads_what_zoo_reads(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5), "shapes")
    ranks = data.draw(st.integers(1, 5), "ranks")
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e5m2])
    values: Values = {}
    for k, shape in enumerate(shapes):
        for role in ("parameter", "exp_avg"):
            numbers = torch.arange(math.prod(shape)).view(shape) % 50 + k
            values[f"t{k}", role] = numbers.to(data.draw(dtypes))
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder), values, ranks)
        alone, zoo = Checkpoint(folder), load(folder)
        assert alone.shapes == zoo.shapes
        assert alone.roles == zoo.roles
        for (name, role), tensor in values.items():
            low = data.draw(st.integers(0, tensor.numel()))
            length = data.draw(st.integers(0, tensor.numel() - low))
            for found in (alone.read(name, role, low, length), zoo.read(name, role, low, length)):
                same({"": found}, {"": tensor.reshape(-1)[low : low + length]})


def test_tensors_across_many_blocks_are_read_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_to_fp32, "PIECE_BYTES", 2 << 20)
    values: Values = {(f"t{k}", "parameter"): torch.randn(n) for k, n in enumerate((1_000_003, 5, 700_001, 300_000))}
    put(tmp_path, values, 2)
    alone = Checkpoint(tmp_path)
    for (name, role), tensor in values.items():
        for low, high in ((0, len(tensor)), (3, len(tensor) - 1), (len(tensor) // 2, len(tensor))):
            assert torch.equal(alone.read(name, role, low, high - low), tensor[low:high])
    for file in (tmp_path / "one").glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        for place in (5000, 1 << 20, len(raw) - 1):
            raw[place] ^= 4
            file.write_bytes(raw)
            with pytest.raises(ValueError, match="has another CRC-32C than the index says"):
                zero_to_fp32.state_dict_of(tensors_of(Checkpoint(tmp_path)))
            raw[place] ^= 4
        file.write_bytes(raw)


@given(num_bytes=st.integers(0, 3 << 20) | st.sampled_from([0, 1, 2, 1023, 1024, 1025, 1 << 20, (1 << 20) + 1]))
@examples(times=1)
def test_checksums_are_those_of_zoo(num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    blocks = torch.split(torch.from_numpy(data), 1 << 20) if num_bytes else []
    assert crc32c(data) == [native_crc32c(block) for block in blocks]


def test_the_checksum_is_that_of_the_rfc() -> None:
    """RFC 3720, appendix B.4."""
    for data, crc in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)):
        assert crc32c(np.frombuffer(data, np.uint8)) == [crc]


# -- malicious checkpoints --------------------------------------------------------------------------------------------


def _with_index(root: Path, change: Callable[[dict[str, Any], bytearray], None]) -> None:
    """Change the header and the columns of the index, and make the manifest agree."""
    import hashlib

    path = root / "one"
    file = next(path.glob("*.index"))
    raw = file.read_bytes()
    size = int.from_bytes(raw[8:16], "little")
    header, body = json.loads(raw[16 : 16 + size]), bytearray(raw[16 + size :])
    change(header, body)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    raw = raw[:8] + len(text).to_bytes(8, "little") + text + body
    file.write_bytes(raw)
    entry = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    rewrite(path, lambda manifest: manifest["index"].update(entry))


def _set(column: str, value: int, row: int = 0) -> Callable[[dict[str, Any], bytearray], None]:
    def change(header: dict[str, Any], body: bytearray) -> None:
        width = 4 if column in ("state", "file") else 8
        at = header["columns"][column][1] + row * width
        body[at : at + width] = value.to_bytes(width, "little", signed=True)

    return change


BAD_INDEX: dict[str, Callable[[dict[str, Any], bytearray], None]] = {
    "path": lambda h, b: h["files"][0].__setitem__(0, "../../etc/passwd"),
    "name of another kind": lambda h, b: h["files"][0].__setitem__(0, ["x"]),
    "size of a file": lambda h, b: h["files"][0].__setitem__(1, 1 << 60),
    "negative size": lambda h, b: h["files"][0].__setitem__(1, -1),
    "sums": lambda h, b: h["files"][0].__setitem__(2, 1 << 40),
    "shape": lambda h, b: h["states"][0].__setitem__(3, [1 << 61]),
    "shape that wraps": lambda h, b: h["states"][0].__setitem__(3, [1 << 32, 1 << 32]),
    "shape of another kind": lambda h, b: h["states"][0].__setitem__(3, "many"),
    "dtype": lambda h, b: h["states"][0].__setitem__(2, "nn"),
    "twice": lambda h, b: h["states"].append(h["states"][0]),
    "column": lambda h, b: h["columns"].__setitem__("start", [1 << 60, 0]),
    "column before": lambda h, b: h["columns"].__setitem__("start", [1, -8]),
    "column of another kind": lambda h, b: h["columns"].__setitem__("start", None),
    "blocks": lambda h, b: h.__setitem__("block_bytes", 1 << 40),
    "no states": lambda h, b: h.pop("states"),
    "state": _set("state", 7),
    "negative state": _set("state", -1),
    "file": _set("file", 9),
    "offset": _set("offset", 1 << 50),
    "negative offset": _set("offset", -8),
    "length": _set("length", (1 << 62) - 1),
    "start": _set("start", 4),
    "gap": _set("length", 1),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sorted(BAD_INDEX))
@pytest.mark.parametrize("reader", ["zoo", "alone"])
def test_an_index_that_lies_is_refused_before_anything_is_made_of_it(tmp_path: Path, kind: str, reader: str) -> None:
    put(tmp_path, {("w", "parameter"): torch.ones(9)})
    _with_index(tmp_path, BAD_INDEX[kind])
    if reader == "zoo":
        with pytest.raises(CheckpointError):
            get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    else:
        with pytest.raises(ValueError) as raised:
            zero_to_fp32.state_dict_of(tensors_of(Checkpoint(tmp_path)))
        assert len(str(raised.value).splitlines()) == 1


def test_one_run_of_bytes_cannot_be_many_tensors(tmp_path: Path) -> None:
    """Else a small file could ask for any amount of memory."""
    put(tmp_path, {(f"w{k}", "parameter"): torch.ones(4000) for k in range(3)}, 1)

    def change(header: dict[str, Any], body: bytearray) -> None:
        for row in range(3):
            _set("offset", header["files"][0][1] - 16000, row)(header, body)

    _with_index(tmp_path, change)
    Checkpoint(tmp_path)  # the file is large enough for it: its bytes are read, and no more memory than it has is made
    put(tmp_path, {(f"w{k}", "parameter"): torch.ones(40000) for k in range(3)}, 1)

    def more(header: dict[str, Any], body: bytearray) -> None:
        header["states"] = [[f"w{k}", "parameter", "float64", [59000]] for k in range(3)]
        for row in range(3):
            _set("offset", 4096, row)(header, body)
            _set("length", 59000, row)(header, body)

    _with_index(tmp_path, more)
    with pytest.raises(ValueError, match="has some bytes of a file twice"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{}", "null", '{"format": "zoo-checkpoint", "version": 3}', "\xff", ""]
)
def test_a_manifest_that_is_none_is_one_sentence(tmp_path: Path, text: str) -> None:
    put(tmp_path, {("w", "parameter"): torch.ones(9)})
    (tmp_path / "one" / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError) as raised:
        Checkpoint(tmp_path)
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 1000


def test_links_pipes_and_tags_that_leave_the_directory_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "run"
    put(root, {("w", "parameter"): torch.ones(9)}, 1)
    for tag in ("../run", "a/b", "", ".hidden"):
        with pytest.raises(ValueError, match="is not the name of a checkpoint"):
            Checkpoint(root, tag)
    data, manifest = next((root / "one").glob("*.safetensors")), root / "one" / "manifest.json"
    for path in (data, manifest):
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
        with pytest.raises(ValueError, match="cannot be opened"):
            zero_to_fp32.state_dict_of(tensors_of(Checkpoint(root)))
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(ValueError, match="is not a plain file"):
            zero_to_fp32.state_dict_of(tensors_of(Checkpoint(root)))
        path.unlink()
        (tmp_path / "moved").rename(path)
    zero_to_fp32.state_dict_of(tensors_of(Checkpoint(root)))


ODD = st.integers(-9, 5000) | st.sampled_from([
    -1, 0, 1, 7, 1 << 31, 1 << 40, (1 << 62) - 1, 1 << 63, 1 << 70, 0.5, None, True, "", "x", "../x", "rank", [], [0],
])  # fmt: skip


def _mutated(value: Any, data: st.DataObject) -> Any:
    """A JSON document in which one place is another."""
    if isinstance(value, (dict, list)) and value and data.draw(st.integers(0, 9)):
        key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        changed: Any = dict(value) if isinstance(value, dict) else list(value)
        what = data.draw(st.integers(0, 9))
        if what == 0:
            del changed[key]
        elif what == 1 and isinstance(changed, list):
            changed.append(changed[key])
        else:
            changed[key] = _mutated(value[key], data)
        return changed
    return data.draw(ODD)


def _read_all(source: Any, limit: int) -> dict[tuple[str, str], torch.Tensor]:
    found, total = {}, 0
    for name, roles in source.roles.items():
        for role in roles:
            tensor = source.read(name, role, 0, math.prod(source.shapes[name]))
            total += tensor.nbytes
            assert total <= limit, "more than the files have"
            found[name, role] = tensor
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[tuple[str, str], torch.Tensor]]:
    root = tmp_path_factory.mktemp("prepared")
    put(root, model_values() | {("w", "parameter"): torch.randn(50, 9), ("w", "exp_avg"): torch.randn(50, 9)})
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return files, _read_all(load(root), 1 << 40)


@given(data=st.data())
@examples(times=3)
def test_no_mutant_is_read_as_another_checkpoint_or_raises_more_than_a_sentence(
    prepared: tuple[dict[str, bytes], dict[tuple[str, str], torch.Tensor]], data: st.DataObject
) -> None:
    files, original = prepared
    size = sum(map(len, files.values()))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "one").mkdir()
        for name, content in files.items():
            (root / name).write_bytes(content)
        kind = data.draw(st.sampled_from(["bytes", "manifest", "index", "columns"]))
        if kind == "bytes":  # of any file, and no checksum is made to fit
            path = root / data.draw(st.sampled_from(sorted(name for name in files if name != "latest")))
            raw = bytearray(path.read_bytes())
            for _ in range(data.draw(st.integers(1, 3))):
                raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
            path.write_bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) // 2, len(raw) - 1]))])
        elif kind == "manifest":
            rewrite(root / "one", lambda document: document.pop("sha256"))  # without it the rest is looked at
            document = json.loads((root / "one" / "manifest.json").read_text())
            (root / "one" / "manifest.json").write_text(json.dumps(_mutated(document, data)))
        elif kind == "index":
            _with_index(root, lambda header, body: header.update(_mutated_header(header, data)))
        else:
            _with_index(root, lambda header, body: _mutate_columns(body, data))
        for opened in (Checkpoint, load):
            found, said = None, ""
            try:
                found = _read_all(opened(folder, "one"), 2 * size)
            except ValueError as error:
                said = str(error)
            assert len(said.splitlines()) == (found is None)
            if found is not None and kind in ("bytes", "manifest"):
                same({f"{k}": v for k, v in found.items()}, {f"{k}": v for k, v in original.items()})


def _mutated_header(header: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    found = _mutated(header, data)
    return found if isinstance(found, dict) else {"states": found}


def _mutate_columns(body: bytearray, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
