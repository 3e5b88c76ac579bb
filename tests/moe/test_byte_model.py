"""The main job with --moe: experts in the byte model, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from zoo.cli.app import app
from zoo.examples.byte_lm import load
from zoo.examples.byte_lm.model import ByteGPT, MlpChoice, ModelConfig
from zoo.moe import LossFreeGate, MixtureOfExperts

SIZE: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "context": 16}


def model(seed: int = 0, **params: Any) -> ByteGPT:
    return ByteGPT(ModelConfig(**SIZE, mlp=MlpChoice(type="moe", params=params)), seed=seed)


def test_the_seed_says_the_weights_and_only_training_has_the_losses() -> None:
    first, again, other = model(), model(), model(1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.blocks[0].mlp.mixture.experts.up, other.blocks[0].mlp.mixture.experts.up)
    x = torch.randint(256, (2, 16))
    trained = first(x, x)
    plain = first.eval()(x, x)
    # Two layers whose balance losses are about 1, times 0.01.
    assert float((trained - plain).detach()) == pytest.approx(0.02, rel=0.2)


def test_active_parameters_are_fewer_than_the_dense_models() -> None:
    mixture = model().blocks[0].mlp.mixture
    assert isinstance(mixture, MixtureOfExperts)
    active = sum(p[0].numel() for p in mixture.experts.parameters()) * mixture.gate.k + mixture.gate.weight.numel()
    active += sum(p.numel() for p in mixture.shared.parameters())
    assert active < 0.55 * 8 * 32 * 32


@pytest.mark.dear
def test_it_trains_is_saved_and_loaded(tmp_path: Path) -> None:
    options = ["--moe", "--steps", "3", "--out", str(tmp_path / "run"), "--set", "train.task.params.layers=1"]
    options += ["--set", "train.task.params.width=16", "--set", "train.task.params.heads=2"]
    options += ["--set", "train.task.params.context=16", "--set", "train.task.params.sample_bytes=0"]
    options += ["--set", 'train.task.params.mlp.params={"num_experts": 4, "gate": {"type": "loss_free"}}']
    text = tmp_path / "text"
    text.write_text("a text of some length. " * 400)
    options += ["--set", f"train.task.params.text={text}", "--set", "train.task.params.num_validation_windows=4"]
    options += ["--set", "train.task.params.num_segments=4"]
    result = CliRunner().invoke(app, ["train", "byte_lm", *options])
    assert result.exit_code == 0, result.output
    found = load(tmp_path / "run/model")
    gate = found.blocks[0].mlp.mixture.gate
    assert isinstance(gate, LossFreeGate)
    assert bool(gate.bias.any())


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(ValueError, match="mlp"):
        ByteGPT(ModelConfig(**SIZE, mlp=MlpChoice(type="nothing")))
