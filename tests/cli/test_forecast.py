"""``zoo forecast MODEL --gpus N``: what it prints, and what it refuses in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zoo.cli.app import app
from zoo.examples import configuration
from zoo.examples.byte_lm.model import ByteGPT, ModelConfig


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


def test_training_that_never_ends_has_no_days(model: str) -> None:
    asked = (model, "--gpus", "64", "--batch", "64", "--tokens", "1e12", "--hours-between-failures", "1")
    document = json.loads(ask(*asked, "--json").output)
    assert document["goodput"]["part"] == 0
    assert document["training"] == {"tokens": 1e12, "days": None, "gpu_hours": None}
    assert "1e+12 tokens: never, failures come faster" in ask(*asked).output


def test_the_rest_of_what_no_search_proposes_is_searched(model: str) -> None:
    """Sequences of 3, and recomputation of scores that flash attention has none of: the fastest that fits with it."""
    for option, value in (("--micro-batch", "3"), ("--recompute", "selective")):
        asked = (model, "--gpus", "64", "--batch", "192", "--json")
        document = json.loads(ask(*asked, option, value).output)
        layout = document["layout"]
        assert str(layout[option[2:].replace("-", "_")]) == value
        assert document["fits"]
        assert layout["tensor"] * layout["data"] * layout["pipeline"] == 64


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "8", "--hardware", "a100"], "named 'a100', and no file is: known are a100-40, a100-80"),
        (["--gpus", "8", "--peak"], "--peak is for a configuration of zoo train; leave out"),
        (["--gpus", "8", "--set", "a=1"], "--set is for a configuration of zoo train"),
        (["--gpus", "8", "--ranks", "1"], "--ranks is for a configuration of zoo train"),
        (["--gpus", "8", "--rank", "0"], "--rank is for a configuration of zoo train"),
        (["--gpus", "8", "--device", "cuda"], "--device is for a configuration of zoo train"),
        (["--batch", "256"], "--batch goes with --gpus N"),
        (["--seq", "8"], "--seq goes with --gpus N"),
        (["--hours-between-failures", "5"], "--hours-between-failures goes with --gpus N"),
        (["--checkpoint-s", "5"], "--checkpoint-s goes with --gpus N"),
        (["--restart-s", "5"], "--restart-s goes with --gpus N"),
        (["--software", "lean"], "--software is of a forecast of time: give --hardware too"),
        (["--gpus", "8", "--hours-between-failures", "inf"], "no number is infinite"),
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


def gpt2(folder: Path, **more: Any) -> str:
    file = folder / "gpt2.json"
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    file.write_text(json.dumps({**config, **more}))
    return str(file)


def test_sequences_are_no_longer_than_the_model_has_positions(tmp_path: Path, model: str) -> None:
    """A table of positions has no more rows than it has; rotary angles go on, which is said."""
    document = json.loads(ask(gpt2(tmp_path), "--gpus", "8", "--batch", "8", "--json").output)
    assert document["time"]["tokens"] == 8 * 1024
    assert document["notes"] == []
    found = ask(gpt2(tmp_path), "--gpus", "8", "--seq", "2048")
    assert found.exit_code == 2
    assert "seq=2048 and a table of 1024 positions" in found.output
    config = Path(model) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 2048}))
    document = json.loads(ask(model, "--gpus", "64", "--batch", "64", "--json").output)
    assert document["time"]["tokens"] == 64 * 2048
    longer = ask(model, "--gpus", "64", "--batch", "64", "--seq", "8192")
    assert longer.exit_code == 0
    assert "sequences of 8,192 tokens: the model states 2,048 positions" in longer.output


def test_a_model_in_the_place_of_a_configuration_is_said(model: str) -> None:
    found = ask(f"{model}/config.json")
    assert found.exit_code == 2
    assert "config.json is a model (llama), no configuration of zoo train: add --gpus N" in found.output


def test_a_job_is_an_example_too(tmp_path: Path) -> None:
    found = ask("byte_lm", "--ranks", "2")
    assert found.exit_code == 0, found.output
    assert "parameters in memory" in found.output
    assert "rank=2 of 2 ranks; it is from 0 to 1" in ask("byte_lm", "--ranks", "2", "--rank", "2").output


def test_the_peak_of_a_job_on_nvme_writes_nothing_there() -> None:
    place = '{"device": "nvme", "nvme_path": "/no/such/device"}'
    found = ask("byte_lm", "--ranks", "2", "--peak", "--set", f"zero_optimization.offload_optimizer={place}",
                "--set", "zero_optimization.stage=3")  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "most allocated at the same time" in found.output


MODELS = """
import torch
from torch import nn
from zoo.cost import Transformer
from zoo.examples.byte_lm.task import ByteTask
shape = lambda: Transformer(hidden=512, heads=8, layers=4, seq=256, vocab=1000)
plain = lambda: nn.Linear(3, 3)
words = lambda: {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 99}
def broken():
    raise KeyError("x")
class Wide(ByteTask):
    pass
"""


def test_a_model_is_a_function_or_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What MODULE:FUNCTION gives, and the model of a task, are forecast as a config.json of the same shape is."""
    (tmp_path / "forecast_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    asked = ("--gpus", "8", "--batch", "64", "--json")
    document = json.loads(ask("forecast_models:shape", *asked).output)
    assert document["time"]["tokens"] == 64 * 256
    (tmp_path / "words.json").write_text(
        json.dumps(
            {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 99}
        )
    )
    assert ask("forecast_models:words", *asked).output == ask("words.json", *asked).output
    example = json.loads(ask("byte_lm", *asked).output)
    task = json.loads(ask("byte_lm", "--task", "forecast_models:Wide", *asked).output)
    assert example == task
    params = json.loads(configuration("byte_lm").read_text())["train"]["task"]["params"]
    assert example["parameters"] == sum(p.numel() for p in ByteGPT(ModelConfig(**params)).parameters())
    assert example["time"]["tokens"] == 64 * 128
    found = ask("byte_lm", "--task", "forecast_models:Wide", "--ranks", "2")
    assert found.exit_code == 0, found.output
    assert found.output == ask("byte_lm", "--ranks", "2").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["forecast_models:plain", "--gpus", "8"], "gives a Linear, which has no config of transformers"),
        (["forecast_models:broken", "--gpus", "8"], "forecast_models:broken raised KeyError: 'x'"),
        (["forecast_models:none", "--gpus", "8"], "the module forecast_models has no 'none'"),
        (["no_such_module:shape", "--gpus", "8"], "there is no module 'no_such_module'"),
        (["forecast_models:shape"], "is no file; if it is MODULE:FUNCTION that gives a model, add --gpus N"),
        (["forecast_models:shape", "--gpus", "8", "--task", "forecast_models:Wide"], "leave one out"),
        (["byte_lm", "--task", "forecast_models:none"], "module 'forecast_models' has no attribute 'none'"),
        (["byte_lm", "--task", "no_such_module:Task"], "No module named 'no_such_module'"),
        (["byte_lm", "--task", "Wide"], "it is MODULE:FUNCTION, such as"),
        (["byte_lm", "--gpus", "8", "--task", "no_such_module:Task"], "No module named 'no_such_module'"),
    ],
)  # fmt: skip
def test_models_and_tasks_that_are_not_there_get_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    (tmp_path / "forecast_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    found = ask(*arguments)
    assert found.exit_code != 0
    assert said in " ".join((found.output + str(found.exception or "")).split())
    assert "Traceback" not in found.output
