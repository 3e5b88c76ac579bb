"""What a process does before its first step is what a job waits for whenever it starts again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.optim import AdamW
from zoo.optim.base import add_group

TRAINS = """
import os, sys
import torch
from torch.utils.data import TensorDataset

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
config = {
    "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": int(sys.argv[2])}, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "bf16": {"enabled": True}, "steps_per_print": None,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
}
if sys.argv[1] == "deepspeed":
    from zoo import deepspeed

    engine, *_ = deepspeed.initialize(model=model, config=config)
else:
    from zoo.engine import initialize

    engine, *_ = initialize(config, model)
for _ in range(2):
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
    engine.step()
engine.save_checkpoint(sys.argv[3])
engine.load_checkpoint(sys.argv[3])
print("began", "torch._dynamo" in sys.modules)
"""


@pytest.mark.dear
@pytest.mark.parametrize(("name", "stage"), [("zoo", 2), pytest.param("deepspeed", 3, marks=pytest.mark.slow)])
def test_a_start_imports_no_compiler(tmp_path: Path, name: str, stage: int) -> None:
    """torch._dynamo takes longer to import than all else that a process does before its first step."""
    command = [sys.executable, "-c", TRAINS, name, str(stage), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1:] == ["began False"], ended.stderr


def test_a_group_is_added_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    optimizer = AdamW([torch.nn.Parameter(torch.ones(2))])
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": optimizer.param_groups[0]["params"]})
    monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", lambda *given: called.append(given))
    add_group(optimizer, {"params": []})
    assert called == [(optimizer, {"params": []})], "a wrapper that is not torch's own has to be called"
