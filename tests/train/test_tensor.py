"""The main job with --tp: the byte model cut over tensor ranks, with the loss curve of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.test_pipe import close, curve, document
from typer.testing import CliRunner

from zoo import sim
from zoo.cli.app import app
from zoo.examples.byte_lm import load
from zoo.train import read_config, train
from zoo.train.replay import replay


@pytest.mark.dear
@pytest.mark.parametrize("degree", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_tensor_ranks_have_the_loss_curve_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, degree: int
) -> None:
    text = tmp_path / "text"
    text.write_text("a text of some length, with words. " * 300)

    def run(world: int, out: Path, tp: int, resume: bool = False, **more: Any) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        values = document(out, text, 1, **more)
        values["train"]["task"]["params"] |= {"heads": 4, "sample_bytes": 6}
        config = read_config(values, [f"tensor_parallel.autotp_size={tp}"])
        sim.run(world, lambda rank: train(config, resume=resume))

    # Two batch ranks in each: so the samples of a step are the same ones.
    run(2, tmp_path / "plain", 1)
    run(2 * degree, tmp_path / "cut", degree)
    close(curve(tmp_path / "cut"), curve(tmp_path / "plain"))
    assert (tmp_path / "cut/sample.txt").read_bytes() == (tmp_path / "plain/sample.txt").read_bytes()
    ours, theirs = load(tmp_path / "cut/model"), load(tmp_path / "plain/model")
    for (name, value), (other, wanted) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-4)
    section = {**document(tmp_path / "cut", text, 1)["train"], "steps": 6, "if_exists": "resume"}
    for folder, tp in (("plain", 2), ("cut", 1)):  # each goes on at another degree
        run(2 * tp, tmp_path / folder, tp, resume=True, train={**section, "out": str(tmp_path / folder)})
    close(curve(tmp_path / "cut"), curve(tmp_path / "plain"))
    assert len(curve(tmp_path / "cut")) == 6


@pytest.mark.dear
def test_stages_of_tensor_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text"
    text.write_text("a text of some length, with words. " * 300)

    def run(world: int, out: Path, axes: dict[str, int], tp: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        values = document(out, text, 1, **({"mesh": {"axes": axes}} if axes else {}))
        config = read_config(values, [f"tensor_parallel.autotp_size={tp}"])
        sim.run(world, lambda rank: train(config))

    run(1, tmp_path / "plain", {}, 1)
    run(4, tmp_path / "both", {"pipe": 2, "data": -1, "tensor": 2}, 2)
    close(curve(tmp_path / "both"), curve(tmp_path / "plain"))
    ours, theirs = load(tmp_path / "both/model"), load(tmp_path / "plain/model")
    for (name, value), (other, wanted) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.dear
def test_a_replay_compares_the_parts_of_matrices_that_ranks_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text("a text of some length, with words. " * 300)
    monkeypatch.setenv("WORLD_SIZE", "2")
    values = document(tmp_path / "run", text, 1)
    values["train"] |= {"steps": 2, "checkpoint_every": 1, "save_model": False}
    config = read_config(values, ["tensor_parallel.autotp_size=2"])
    sim.run(2, lambda rank: train(config))
    for found in sim.run(2, lambda rank: replay(tmp_path / "run", 2)):
        assert found.states_compared > 0
        assert found.differences == ()


def test_more_tensor_ranks_than_ranks() -> None:
    result = CliRunner().invoke(app, ["train", "byte_lm", "--tp", "2", "--steps", "1"])
    assert result.exit_code
    assert "tensor" in result.output
