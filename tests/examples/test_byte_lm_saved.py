"""The byte model that a finished run leaves, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from zoo.examples.byte_lm import ByteTask, load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_finished_model_is_loaded_from_its_folder(tmp_path: Path, dtype: torch.dtype) -> None:
    task = ByteTask(ByteTask.Config(layers=1, width=16, heads=2, context=8), seed=3)
    model = task.model().to(dtype).eval()
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    assert f"zoo.examples.byte_lm.load({str(tmp_path)!r})" in task.export(tmp_path)
    found = load(tmp_path)
    x = torch.tensor([[1, 2, 3]])
    assert torch.equal(found(x), model(x))
    assert found.head.weight is found.token.weight
    assert {p.dtype for p in found.parameters()} == {dtype}


def test_what_is_no_byte_model_is_refused(tmp_path: Path) -> None:
    task = ByteTask(ByteTask.Config(layers=1, width=16, heads=2, context=8), seed=3)
    with pytest.raises(ValueError, match=r"model.safetensors' does not exist"):
        load(tmp_path)
    safetensors.torch.save_model(task.model(), tmp_path / "model.safetensors")
    task.export(tmp_path)
    described = tmp_path / "config.json"
    right = json.loads(described.read_text())
    for wrong in (
        [], {**right, "width": "16"}, {**right, "width": True}, {**right, "model_type": "llama"}, {**right, "depth": 1},
        {k: v for k, v in right.items() if k != "heads"},
    ):  # fmt: skip
        described.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="does not describe a byte model"):
            load(tmp_path)
    described.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load(tmp_path)
    described.write_text(json.dumps({**right, "width": 32}))
    with pytest.raises(ValueError, match="does not hold the weights of this byte model"):
        load(tmp_path)
    described.write_text(json.dumps(right))
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="does not hold the weights of this byte model"):
        load(tmp_path)
