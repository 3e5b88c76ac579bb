"""``zoo compress``: from a configuration to packed files and a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from zoo.cli.app import app

SMALL = {
    "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "train": {"task": {"type": "byte_lm", "params": {"layers": 2, "width": 32, "heads": 2, "context": 16}}, "steps": 1},
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def run(*arguments: object) -> str:
    found = CliRunner().invoke(app, ["compress", *map(str, arguments)])
    assert found.exit_code == 0, found.output
    return found.output


def test_it_is_listed() -> None:
    assert "compress" in CliRunner().invoke(app, ["--help"]).output
    assert "quantise" in run("--help")
    assert CliRunner().invoke(app, ["compres"]).exit_code == 2


@pytest.mark.dear
def test_quantise_and_report(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.examples.byte_lm.task import ByteTask

    # Few windows: a report looks at all of them.
    whole = ByteTask.validation_data
    monkeypatch.setattr(ByteTask, "validation_data", lambda self: [whole(self)[i] for i in range(3)])
    nearest, by_columns = tmp_path / "nearest", tmp_path / "gptq"
    assert "layers of 4 bits" in run("quantise", config, "--out", nearest, "--bits", 4, "--group-size", 16)
    run("quantise", config, "--out", by_columns, "--bits", 4, "--group-size", 16, "--gptq", "--samples", 4)
    assert load_file(nearest).keys() == load_file(by_columns).keys()
    out = run("report", config, "--after", nearest, "--plot", tmp_path / "p.png", "--json", tmp_path / "r.json")
    assert "PackedLinear" in out
    assert "validation loss, nats a byte: " in out
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["totals"][1]["num_bytes"] < found["totals"][0]["num_bytes"]
    assert found["totals"][0]["flops"] == found["totals"][1]["flops"] > 0
    assert (tmp_path / "p.png").exists()
    same = run("report", config, "--before", nearest, "--after", nearest)
    assert "(+0.00%)" in same


@pytest.mark.dear
def test_what_it_says(config: Path, tmp_path: Path) -> None:
    def fails(*arguments: object) -> str:
        found = CliRunner().invoke(app, ["compress", *map(str, arguments)])
        assert found.exit_code == 2, found.output
        return found.output

    common = ("quantise", config, "--out", tmp_path / "x", "--group-size", 16)
    assert "there are kernels for equal steps of 8 and 4 bits" in fails(*common, "--bits", 3)
    assert "'xyz' fits no linear layer" in fails(*common, "--leave-out", "xyz")
    assert "--blocks is 'heads'" in fails(*common, "--gptq", "--blocks", "heads")
    assert not (tmp_path / "x").exists()
    save_file({"x": torch.ones(1)}, tmp_path / "other")
    assert "is no file of this task's model" in fails("report", config, "--after", tmp_path / "other")


@pytest.mark.dear
def test_a_file_that_is_cut_short_is_one_sentence(config: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run("quantise", config, "--out", whole, "--group-size", 16)
    whole.write_bytes(whole.read_bytes()[:-3])
    found = CliRunner().invoke(app, ["compress", "report", str(config), "--after", str(whole)])
    assert found.exit_code == 2
    assert "is no whole safetensors file" in found.output
