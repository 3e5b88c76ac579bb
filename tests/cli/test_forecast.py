"""``zoo forecast MODEL --gpus N``: what it prints, and what it refuses in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zoo.cli.app import app


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {
        "model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
        "num_hidden_layers": 80, "intermediate_size": 28672, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def ask(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["forecast", *arguments])


def test_a_layout_is_found_and_its_parts_add_up(model: str) -> None:
    found = ask(model, "--gpus", "64", "--batch", "128", "--seq", "8192", "--tokens", "1e12", "--json")
    assert found.exit_code == 0, found.output
    document = json.loads(found.output)
    assert document["parameters"] == 70_553_706_496
    assert document["fits"]
    time = document["time"]
    assert time["tokens"] == 128 * 8192
    days = 1e12 / time["tokens_per_s"] / document["goodput"]["part"] / 86_400
    assert document["training"]["days"] == pytest.approx(days)
    assert document["training"]["gpu_hours"] == pytest.approx(64 * 24 * days)
    text = ask(model, "--gpus", "64", "--batch", "128", "--seq", "8192", "--tokens", "1e12").output
    assert "70.55 B parameters on 64 of h100-80" in text
    assert "1e+12 tokens: " in text
    assert "fastest of " in text


def test_what_does_not_fit_says_what_would(model: str) -> None:
    found = ask(model, "--gpus", "64", "--batch", "64", "--stage", "1", "--tensor", "1", "--pipeline", "1")
    assert "it does not fit" in found.output
    assert "nearest layouts that fit:" in found.output
    assert "stage=3" in found.output
    none = ask(model, "--gpus", "4", "--batch", "4")
    assert "no layout of these ranks fits" in none.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "8", "--hardware", "a100"], "named 'a100', and no file is: known are a100-40, a100-80"),
        (["--gpus", "8", "--peak"], "--peak is for a configuration of zoo train; leave out"),
        (["--gpus", "8", "--set", "a=1"], "--set is for a configuration of zoo train"),
        (["--stage", "3"], "--stage goes with --gpus N and a model's config.json"),
        (["--micro-batch", "3"], "--micro-batch goes with --gpus N"),
        (["--gpus", "8", "--software", "fast"], "no software is named 'fast': known are eager, lean"),
        (["--gpus", "7", "--batch", "8"], "a batch of 8 cannot be spread over 7 ranks"),
        (["--gpus", "8", "--batch", "8", "--tensor", "16"], "need a multiple of 16 GPUs, not 8"),
        (["--gpus", "8", "--batch", "8", "--recompute", "some"], "recompute='some'; allowed are none"),
        (["--gpus", "8", "--hours-between-failures", "0"], "both are above 0"),
    ],
)  # fmt: skip
def test_mistakes_get_a_sentence(model: str, arguments: list[str], said: str) -> None:
    found = ask(model, *arguments)
    assert found.exit_code != 0
    assert said in " ".join((found.output + str(found.exception or "")).split())
    assert "Traceback" not in found.output
