"""What DeepSpeed's schedules really do: the rates (and first betas) that Adam uses in its first steps.

``python tests/lr_schedules/peers.py`` in an environment that has deepspeed writes peers.json, which quick tests read.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_suffix(".json")
STEPS = 30
CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 29, "warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 5}),
    ("WarmupDecayLR", {"total_num_steps": 29, "warmup_max_lr": 0.1, "warmup_num_steps": 8, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 29, "warmup_min_ratio": 0.1, "warmup_num_steps": 7, "cos_min_ratio": 0.05}),
    ("WarmupCosineLR", {"total_num_steps": 29, "warmup_num_steps": 4, "warmup_type": "linear"}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 8}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 5, "cycle_second_step_size": 9,
                  "decay_lr_rate": 0.5, "decay_step_size": 3, "decay_mom_rate": 0.01}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 9, "cycle_first_stair_count": 2,
                  "cycle_second_stair_count": 3, "cycle_momentum": False}),
]  # fmt: skip


def used(module: Any, name: str, params: dict[str, Any], steps: int = STEPS, groups: int = 1) -> list[Any]:
    """For each step, for each group: learning rate and first beta of Adam when it makes the step."""
    optimizer = torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=0.5)
    schedule = getattr(module, name)(optimizer, **params)
    found = []
    for _ in range(steps):
        found.append([[float(g["lr"]), float(g["betas"][0])] for g in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def main() -> None:
    logging.disable(logging.CRITICAL)
    import deepspeed
    from deepspeed.runtime import lr_schedules

    cases = [{"name": n, "params": p, "used": used(lr_schedules, n, p)} for n, p in CASES]
    text = json.dumps({"deepspeed": deepspeed.__version__, "cases": cases}, indent=None)
    FILE.write_text(text.replace('{"name"', '\n{"name"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
