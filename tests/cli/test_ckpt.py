"""zoo ckpt: what it prints, its exit codes, and one sentence for whatever a directory holds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from tests.checkpointing.manifests import rewrite
from tests.checkpointing.test_checkpoints import write
from tests.checkpointing.test_consolidation import GOLDEN, Values, put, same
from typer.testing import CliRunner

from zoo.checkpointing import load
from zoo.checkpointing.format.manifest import VERSION
from zoo.cli import app


def ckpt(*args: object) -> Result:
    return CliRunner().invoke(app, ["ckpt", *map(str, args)])


def sentence(result: Result, code: int) -> str:
    """What it said on stderr, where that is one line and no traceback."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("zoo: ")
    return line


def damage(root: Path, tag: str = "one") -> str:
    path = sorted((root / tag).glob("*.safetensors"))[0]
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    return path.name


def test_ls_shows_what_is_whole_and_what_is_not(tmp_path: Path) -> None:
    write(tmp_path, 3, "first")
    write(tmp_path, 2, "second")
    result = ckpt("ls", tmp_path)
    assert result.exit_code == 0, result.output
    head, first, second = result.stdout.splitlines()
    assert head.split() == ["tag", "number", "saved", "size", "ranks", "tensors", "state"]
    assert first.split()[:2] == ["first", "1"]
    assert first.split()[-3:] == ["3", "5", "whole"]
    assert second.split()[:3] == ["*", "second", "2"]
    next((tmp_path / "first").glob("*.index")).unlink()
    result = ckpt("ls", tmp_path)
    assert result.exit_code == 1
    assert "damaged" in result.stdout
    (why,) = (line for line in result.stdout.splitlines() if line.startswith("first: "))
    assert "the index " in why
    found = {one["tag"]: one for one in json.loads(ckpt("ls", tmp_path, "--json").stdout)}
    assert (found["first"]["state"], found["second"]["num_ranks"]) == ("damaged", 2)
    assert sentence(ckpt("ls", tmp_path / "nowhere"), 2).endswith(f"there is no directory '{tmp_path}/nowhere'")


@pytest.mark.parametrize("place", [".", "one"])
def test_show_prints_tensors_numbers_and_meta(tmp_path: Path, place: str) -> None:
    write(tmp_path, 2)
    result = ckpt("show", tmp_path / place)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["version", str(VERSION)] in lines
    assert ["a", "3×5", "parameter", "float32", "60", "1"] in lines
    assert ["scalar", "scalar", "exp_avg", "bfloat16", "2", "1"] in lines
    assert '"step/a": 3' in result.stdout
    assert '"note"' in result.stdout
    found = json.loads(ckpt("show", tmp_path / place, "--json", "--name", "cub").stdout)
    assert list(found["tensors"]) == ["cube"]
    assert found["tensors"]["cube"]["roles"]["parameter"] == {"dtype": "float32", "bytes": 240, "pieces": 2}
    assert (found["ranks"], found["files"], found["scalars"]) == (2, 2, {"step/a": 3})


def test_names_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    put(tmp_path, {("\x1b[2J[red]w\n", "parameter"): torch.ones(1)}, 1)
    assert r"\x1b[2J[red]w\n" in ckpt("show", tmp_path).stdout
    (tmp_path / "b").mkdir()
    put(tmp_path / "b", {("w", "parameter"): torch.ones(1)}, 1)
    assert "\x1b" not in ckpt("diff", tmp_path, tmp_path / "b").stdout


def test_verify_reads_every_byte_of_one_or_all(tmp_path: Path) -> None:
    write(tmp_path, 2, "one")
    write(tmp_path, 2, "two")
    result = ckpt("verify", tmp_path)
    assert result.exit_code == 0, result.output
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["one", "two"]
    name = damage(tmp_path, "one")
    said = sentence(ckpt("verify", tmp_path), 1)
    assert said.startswith("zoo: one: the bytes 0 to ")
    assert f"of the file {name} have another CRC-32C" in said
    assert ckpt("verify", tmp_path / "two").exit_code == 0
    assert ckpt("verify", tmp_path / "one").exit_code == 1
    os.truncate(tmp_path / "one" / name, 10)
    assert "has 10 bytes; the index says" in sentence(ckpt("verify", tmp_path), 1)
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoints" in sentence(ckpt("verify", tmp_path / "empty"), 2)
    assert "does not exist" in sentence(ckpt("verify", tmp_path / "no" / "where"), 2)


@pytest.mark.matrix
@pytest.mark.parametrize("content", ["gone", "../x", ""])
def test_verify_tells_that_latest_names_nothing(tmp_path: Path, content: str) -> None:
    write(tmp_path, 1, "one")
    assert ckpt("verify", tmp_path).exit_code == 0
    (tmp_path / "latest").write_text(content)
    assert "zoo: latest: " in sentence(ckpt("verify", tmp_path), 1)
    assert ckpt("verify", tmp_path / "one").exit_code == 0


def test_ls_has_the_newest_last_damaged_or_not(tmp_path: Path) -> None:
    for tag in ("c", "b", "a"):
        write(tmp_path, 1, tag)
    next((tmp_path / "a").glob("*.safetensors")).unlink()
    found = json.loads(ckpt("ls", tmp_path, "--json").stdout)
    assert [(one["tag"], one["number"], one["state"]) for one in found] == [
        ("c", 1, "whole"), ("b", 2, "whole"), ("a", 3, "damaged"),
    ]  # fmt: skip


def test_verify_of_version_2(tmp_path: Path) -> None:
    assert ckpt("verify", GOLDEN).exit_code == 0
    for path in GOLDEN.rglob("*"):
        if path.is_file():
            target = tmp_path / path.relative_to(GOLDEN)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    damage(tmp_path)
    assert "has SHA-256 " in sentence(ckpt("verify", tmp_path), 1)


def test_a_bar_is_shown_where_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 2)
    assert ckpt("verify", tmp_path).stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "one" in ckpt("verify", tmp_path).stderr


def test_diff_says_what_differs_and_how_much(tmp_path: Path) -> None:
    one = torch.ones(4)
    put(tmp_path / "a", {("w", "parameter"): one, ("w", "exp_avg"): one}, 2, {"step": 1})
    put(tmp_path / "b", {("w", "parameter"): one * 1.25, ("w", "exp_avg"): one}, 3, {"step": 2})
    assert ckpt("diff", tmp_path / "a", tmp_path / "a/one").stdout == "no differences\n"
    result = ckpt("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1:] == [["w", "parameter", "values", "4", "0.25", "0.2"], ["step", "number", "1", "and", "2"]]
    assert ckpt("diff", tmp_path / "a", tmp_path / "b", "--role", "exp_avg").exit_code == 0
    assert ckpt("diff", tmp_path / "a", tmp_path / "b", "--role", "parameter", "--rtol", "0.2").exit_code == 0
    found = json.loads(ckpt("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert (found[0]["what"], found[0]["num_elements"], found[0]["max_abs"]) == ("values", 4, 0.25)
    assert "'adam'" in sentence(ckpt("diff", tmp_path / "a", tmp_path / "b", "--role", "adam"), 2)
    damage(tmp_path / "a")
    assert "another CRC-32C" in sentence(ckpt("diff", tmp_path / "a", tmp_path / "b"), 2)


@pytest.mark.dear
def test_export_writes_what_others_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values: Values = {("w", role): torch.randn(5, 3) for role in ("parameter", "exp_avg")}
    values[("n", "buffer")] = torch.tensor(3)
    put(tmp_path / "run", values)
    weights = {"w": values["w", "parameter"], "n": values["n", "buffer"]}
    half = {"w": weights["w"].bfloat16(), "n": weights["n"]}

    def written(*args: object) -> list[Path]:
        result = ckpt("export", tmp_path / "run", *args)
        assert result.exit_code == 0, result.output
        return [Path(line) for line in result.stdout.splitlines()]

    (path,) = written(tmp_path / "w.safetensors")
    same(load_file(path), weights)
    (path,) = written(tmp_path / "w.bin", "--dtype", "bf16")
    same(torch.load(path, weights_only=True), half)
    (path,) = written(tmp_path / "w.pth", "--format", "bin", "--role", "exp_avg")
    same(torch.load(path, weights_only=True), {"w": values["w", "exp_avg"]})
    (path,) = written(tmp_path / "folder")
    assert path == tmp_path / "folder" / "model.safetensors"
    paths = written(tmp_path / "shards", "--format", "bin", "--max-shard-size", "20B", "--exclude-frozen-parameters")
    assert [p.name[-12:] for p in paths] == ["of-00002.bin", "of-00002.bin", "n.index.json"]
    for args, said in (
        ((tmp_path / "w.bin", "--format", "safetensors"), "is a name of the torch format"),
        ((tmp_path / "w.safetensors", "--format", "bin"), "is a name of safetensors"),
        ((tmp_path / "x", "--format", "gguf"), "--format gguf; it is safetensors or bin."),
        ((tmp_path / "x", "--dtype", "int8"), "--dtype int8; it is fp32, bf16, fp16"),
        ((tmp_path / "x", "--dtype", "nn"), "'nn' is no dtype"),
        ((tmp_path / "x", "--role", "adam"), "has no tensor of the role 'adam'; it has buffer, exp_avg, parameter"),
        ((tmp_path / "x", "--max-shard-size", "much"), "write a number of bytes"),
    ):
        assert said in sentence(ckpt("export", tmp_path / "run", *args), 2)


def test_reshard_upgrades_and_cuts(tmp_path: Path) -> None:
    result = ckpt("reshard", GOLDEN, tmp_path / "new", "--ranks", 5)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'new' / 'one'}\n"
    assert "left out: what belongs to each of the 3 ranks" in result.stderr
    with load(tmp_path / "new") as new:
        assert (new.version, new.world_size, len(new.index.files)) == (VERSION, 5, 5)
    assert ckpt("diff", GOLDEN, tmp_path / "new").exit_code == 0
    assert ckpt("reshard", GOLDEN, tmp_path / "again", "--ranks", 3).stderr == ""
    assert "has a checkpoint 'one'" in sentence(ckpt("reshard", GOLDEN, tmp_path / "new", "--ranks", 5), 2)
    assert "1 to 1024 ranks" in sentence(ckpt("reshard", GOLDEN, tmp_path / "x", "--ranks", 1025), 2)


def test_prune_prints_what_is_gone(tmp_path: Path) -> None:
    for number, tag in enumerate("abcd"):
        put(tmp_path, {("w", "parameter"): torch.ones(1)}, 1, meta={"client": {"loss": number}}, tag=tag)
    assert ckpt("prune", tmp_path, "--keep", 1, "--older-than-s", 1000).stdout == ""
    assert ckpt("prune", tmp_path, "--keep", 2, "--best", "min:client.loss", "--dry-run").stdout == "b\n"
    assert (tmp_path / "b" / "manifest.json").exists()
    assert ckpt("prune", tmp_path, "--keep", 2, "--best", "min:client.loss").stdout == "b\n"
    assert ckpt("prune", tmp_path, "--keep", 1, "--rest-age-s", 5).stdout == "a\nc\n"
    assert "no checkpoint of" in sentence(ckpt("prune", tmp_path, "--keep", 1, "--best", "min:x"), 2)
    assert "there is no directory" in sentence(ckpt("prune", tmp_path / "x", "--keep", 1), 2)
    assert ckpt("prune", tmp_path, "--keep", 0).exit_code == 2


# -- directories that somebody has prepared ---------------------------------------------------------------------------


def _manifest(**fields: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        rewrite(path, lambda document: document.update(fields))

    return change


def _linked(path: Path, pattern: str) -> None:
    file = next(path.glob(pattern))
    moved = path.parent / "moved"
    file.rename(moved)
    file.symlink_to(moved)


PREPARED: dict[str, Callable[[Path], None]] = {
    "huge world": _manifest(world_size=1 << 60),
    "huge number": _manifest(number=1 << 80),
    "huge index": _manifest(index={"name": "0" * 16 + ".index", "size": 1 << 61, "sha256": ""}),
    "index elsewhere": _manifest(index={"name": "../../../etc/passwd", "size": 1, "sha256": ""}),
    "attempt elsewhere": _manifest(attempt="../x"),
    "meta of another kind": _manifest(meta=3),
    "version": _manifest(version=[3]),
    "not JSON": lambda path: (path / "manifest.json").write_bytes(b"\xff{"),
    "deep": lambda path: (path / "manifest.json").write_text("[" * 50_000),
    "manifest linked": lambda path: _linked(path, "manifest.json"),
    "manifest a directory": lambda path: ((path / "manifest.json").unlink(), (path / "manifest.json").mkdir()),  # type: ignore[dict-item,return-value]
    "manifest a pipe": lambda path: ((path / "manifest.json").unlink(), os.mkfifo(path / "manifest.json")),  # type: ignore[dict-item,return-value]
    "index linked": lambda path: _linked(path, "*.index"),
    "data linked": lambda path: _linked(path, "*.safetensors"),
    "index of noise": lambda path: next(path.glob("*.index")).write_bytes(os.urandom(1000)),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sorted(PREPARED))
def test_whatever_a_directory_holds_is_one_sentence(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "run", 2)
    write(tmp_path / "good", 2)
    PREPARED[kind](tmp_path / "run" / "one")
    run, out = tmp_path / "run" / "one", tmp_path / "out"
    for command in (
        ("show", run), ("diff", run, tmp_path / "good"), ("export", run, out), ("reshard", run, out, "--ranks", 2),
    ):  # fmt: skip
        said = sentence(ckpt(*command), 2)
        assert len(said) < 600
        assert not out.exists()
    assert len(sentence(ckpt("verify", run), 1)) < 600
    listed = ckpt("ls", tmp_path / "run")
    assert listed.exit_code == 1
    assert "damaged" in listed.stdout
    assert "Traceback" not in listed.output


def test_a_folder_without_checkpoints_and_a_checkpoint_are_told_from_a_folder_of_some(tmp_path: Path) -> None:
    write(tmp_path / "run", 1)
    (tag,) = [one.name for one in (tmp_path / "run").iterdir() if one.is_dir()]
    said = sentence(ckpt("ls", tmp_path / "run" / tag), 2)
    assert said.endswith(
        f"'{tmp_path}/run/{tag}' is a checkpoint itself; give the folder that it is in, '{tmp_path}/run'"
    )
    listed = ckpt("ls", tmp_path)
    assert (listed.exit_code, listed.stdout) == (0, f"there are no checkpoints in {tmp_path}\n")


@pytest.mark.dear
def test_a_latest_that_is_none_does_not_hide_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, 2)
    for content in ("../../etc\n", "x" * 5000, "gone\n"):
        (tmp_path / "latest").write_text(content)
        assert ckpt("ls", tmp_path).exit_code == 0
        assert ckpt("show", tmp_path).exit_code == 0
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("/etc/hostname")
    assert ckpt("ls", tmp_path).exit_code == 0
    assert ckpt("show", tmp_path).exit_code == 0


def test_groups_that_are_no_json_are_named(tmp_path: Path) -> None:
    (tmp_path / "groups.json").write_text("[[")
    said = sentence(ckpt("import", tmp_path / "none", tmp_path / "out", "--groups", tmp_path / "groups.json"), 2)
    assert "groups.json' is no JSON" in said
