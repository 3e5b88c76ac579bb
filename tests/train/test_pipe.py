"""The main job with --pipe: the byte model in stages, with the loss curve of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from zoo import sim
from zoo.cli.app import app
from zoo.examples.byte_lm import load
from zoo.train import read_config, train


def document(out: Path, text: Path, pipe: int, **more: Any) -> dict[str, Any]:
    task = {
        "layers": 2, "width": 16, "heads": 2, "context": 16, "sample_bytes": 0, "text": str(text), "num_segments": 4,
        "num_validation_windows": 6,
    }  # fmt: skip
    return {
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "steps_per_print": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.005}}, "zero_optimization": {"stage": 3},
        "train": {
            "task": {"type": "byte_lm", "params": task}, "steps": 4, "out": str(out), "validate_every": 2,
            "checkpoint_every": 2, "threads": 1,
        },
        **({"mesh": {"axes": {"pipe": pipe, "data": -1}}} if pipe > 1 else {}),
        **more,
    }  # fmt: skip


def curve(out: Path) -> list[tuple[float, float, float]]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"], row.get("validation_loss", 0.0)) for row in rows]


def close(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
def test_stages_and_shards_have_the_loss_curve_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    text = tmp_path / "text"
    text.write_text("a text of some length, with words. " * 300)

    def run(world: int, out: Path, pipe: int, resume: bool = False, **more: Any) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        config = read_config(document(out, text, pipe, **more))
        sim.run(world, lambda rank: train(config, resume=resume))

    # Two data-parallel ranks in each: so the samples of a step are the same ones.
    run(2, tmp_path / "plain", 1)
    run(4, tmp_path / "pipe", 2, pipeline={"schedule": {"type": "zb_h1"}})
    close(curve(tmp_path / "pipe"), curve(tmp_path / "plain"))
    ours, theirs = load(tmp_path / "pipe/model"), load(tmp_path / "plain/model")
    for (name, value), (other, wanted) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-4)
    for folder in ("plain", "pipe"):  # both go on without stages
        section = {**document(tmp_path / folder, text, 1)["train"], "steps": 6, "if_exists": "resume"}
        run(2, tmp_path / folder, 1, resume=True, train=section)
    close(curve(tmp_path / "pipe"), curve(tmp_path / "plain"))
    assert len(curve(tmp_path / "pipe")) == 6


def test_more_stages_than_ranks() -> None:
    result = CliRunner().invoke(app, ["train", "byte_lm", "--pipe", "2", "--steps", "1"])
    assert result.exit_code
    assert "mesh.axes" in result.output


def test_the_section_without_the_axis(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a text of some length, with words. " * 300)
    with pytest.raises(ValueError, match=r"pipeline\.stages = 2, and the mesh has 1"):
        train(read_config(document(tmp_path / "run", text, 1, pipeline={"stages": 2})))
