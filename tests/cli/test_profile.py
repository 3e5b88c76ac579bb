"""``zoo profile``: what it prints and writes, and what it refuses in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from zoo.cli.app import app

HERE = "tests.cli.test_profile"


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def called() -> Any:
    return small(), (torch.ones(5, 8),)


def nothing() -> int:
    return 3


def broken() -> nn.Module:
    raise RuntimeError("no weights here")


def asks(size: int) -> nn.Module:
    return nn.Linear(size, size)


def frozen() -> Any:
    return small().requires_grad_(False), (torch.ones(5, 8),)


def one_tensor() -> Any:
    return small(), torch.ones(5, 8)


def too_many() -> Any:
    return small(), (torch.ones(5, 8),), {}, 3


def by_name() -> Any:
    return nn.Linear(8, 4, dtype=torch.complex64), None, {"input": torch.ones(5, 8, dtype=torch.complex64)}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["profile", *arguments])


def test_a_function_that_makes_a_model(tmp_path: Path) -> None:
    found = run(f"{HERE}:small", "--shape", "500,8", "--top", "2", "--peak-tflops", "1", "--backward")
    assert found.exit_code == 0, found.output
    for text in ("192 K", "FLOPs of backward", "utilisation", "(0): Linear(", "seconds of forward"):
        assert text in found.stdout
    files = ["--json", str(tmp_path / "p.json"), "--flame", str(tmp_path / "p.html")]
    found = run(f"{HERE}:called", "--no-detailed", "--meta", *files)
    assert found.exit_code == 0, found.output
    assert "seconds" not in found.stdout
    assert "(0): Linear(" not in found.stdout
    assert json.loads((tmp_path / "p.json").read_text())["model"]["forward"]["macs"] == 5 * (128 + 64)
    assert "<html" in (tmp_path / "p.html").read_text()


def test_a_model_that_is_called_by_name_and_with_complex_numbers() -> None:
    found = run(f"{HERE}:by_name", "--backward")
    assert found.exit_code == 0, found.output
    assert "FLOPs of backward" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Bert", "T5"])
def test_models_of_transformers_need_no_memory(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "Llama": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 4, "num_attention_heads": 64},
        "Bert": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        "T5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    }  # fmt: skip
    getattr(transformers, f"{kind}Config")(vocab_size=1000, **sizes[kind]).save_pretrained(tmp_path)
    found = run(str(tmp_path), "--batch", "2", "--seq", "64", "--backward", "--json", str(tmp_path / "p.json"))
    assert found.exit_code == 0, found.output
    document = json.loads((tmp_path / "p.json").read_text())
    assert document["not_counted"] == {}
    if kind == "Llama":
        per_layer = 4 * 8192**2 + 3 * 8192 * 28672
        linear = 128 * (4 * per_layer + 8192 * 1000)
        scores = 4 * 2 * 64 * 64 * 8192 * 2
        assert document["model"]["forward"]["macs"] - linear - scores in (0, 64 * 64)  # rotary angles
        assert document["model"]["parameters"]["numel"] == 4 * (per_layer + 2 * 8192) + 2 * 8192 * 1000 + 8192


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["model.py"], "'model.py' is no model; it is a folder of a model of transformers"),
        (["nowhere_at_all:small"], "there is no module 'nowhere_at_all'"),
        ([f"{HERE}:large"], "has no 'large'"),
        ([f"{HERE}:nothing", "--shape", "3"], "returned a int"),
        ([f"{HERE}:broken"], f"{HERE}:broken raised RuntimeError: no weights here"),
        ([f"{HERE}:asks"], f"{HERE}:asks raised TypeError: asks() missing 1 required positional argument: 'size'"),
        ([f"{HERE}:frozen", "--backward"], "without a tensor that has a gradient: there is no backward of it"),
        ([f"{HERE}:one_tensor"], "returned a tensor of 5,8 as args and a dict as kwargs of its model; args"),
        ([f"{HERE}:too_many"], "returned a tuple of 4, the first a Sequential; it returns a model, or"),
        ([f"{HERE}:small"], "give --shape, or return (model, args, kwargs)"),
        ([f"{HERE}:small", "--shape", "5x8"], "it is sizes with commas between them"),
        ([f"{HERE}:small", "--shape", "5,7"], "the model cannot be called with a tensor of 5,7: RuntimeError: "),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZOO_TRACEBACK", raising=False)
    found = run(*arguments)
    assert found.exit_code == 2, found.output
    assert says in found.stderr
    assert found.stderr.startswith("zoo: ")


@pytest.mark.parametrize("option", ["--flame", "--json"])
def test_a_file_that_cannot_be_written_is_said_before_anything_runs(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run(f"{HERE}:broken", option, str(tmp_path / "file" / "x"))
    assert found.exit_code == 2
    assert "x cannot be written: Not a directory" in found.stderr
