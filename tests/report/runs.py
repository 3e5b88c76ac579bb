"""Directories as runs leave them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)> & \" ' \u2028"


def spans(delay: float = 0.0) -> list[list[Any]]:
    found: list[list[Any]] = [["compute", "batch", "", 0.0, 0.001, 0]]
    now = 0.001
    for kind in ("forward", "backward"):
        for unit in ("embedding", "blocks.0", "blocks.1", "head"):
            found.append(["communication", "gather", f"'{unit}'", now - 0.001, now + 0.002 + delay, 65536])
            found.append(["compute", "wait", f"'{unit}'", now, now + 0.002 + delay, 65536])
            found.append(["compute", kind, unit, now + 0.002 + delay, now + 0.008, 0])
            now += 0.008
            if kind == "backward":
                found.append(["communication", "reduce", f"'{unit}'", now, now + 0.006, 65536])
    return [*found, ["compute", "update", "", now, now + 0.009, 0]]


def whole_run(folder: Path, steps: int = 40) -> Path:
    """All files that ``zoo train`` writes and a report reads."""
    folder.mkdir(exist_ok=True, parents=True)
    with open(folder / "log.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            record: dict[str, Any] = {
                "step": step, "loss": 1.3 + 2.7 * math.exp(-(step - 1) / 10) + 0.05 * math.sin(9 * (step - 1)),
                "lr": 0.005 * step / steps, "grad_norm": 1.0 + math.cos(step), "skipped": False,
                "tokens_per_s": 40960.0,
                "elapsed_s": step * 0.1, "step_s": 0.1, "wire_bytes": 7_340_032, "user/accuracy": step / steps,
            }  # fmt: skip
            if step % 5 == 0:
                record |= {"rss_bytes": [400 << 20, 410 << 20], "state_bytes": [9_800_000, 9_700_000]}
                record["validation_loss"] = record["loss"] + 0.05
            file.write(json.dumps(record) + "\n")
    wire = {"all_gather": 4_000_000, "reduce_scatter": 3_300_000}
    files: dict[str, Any] = {
        "result.json": {
            "validation_loss": 1.321, "unit": "byte", "baseline": "byte bigram", "baseline_loss": 2.434,
            "beats_baseline": True, "steps": steps, "tokens": 163840, "train_s": 4.0, "tokens_per_s": 40960.0,
            "total_tokens": 327_680,
            "total_s": 9.0, "world_size": 2, "stage": 3, "num_parameters": 630_000,
            "peak_resident_bytes": [2**29, 2**28], "kept_bytes": [9_800_000, 9_700_000],
            "forecast_kept_bytes": [9_800_000, 9_700_000],
            "wire_bytes": [1_100, 1_100], "forecast_wire_bytes": [1_000, 1_000],
        },
        "run.json": {"world_size": 2, "torch": "2.15.0", "python": "3.11.7"},
        "config.json": {"train": {"task": {"type": "byte_lm"}}, "zero_optimization": {"stage": 3}},
        "origins.json": [["zero_optimization.stage", "3", "override"], ["seed", "1234", "default"]],
        "environment.json": {"torch": "2.15.0", "processor": "EPYC", "memory_bytes": 2**34, "ranks": 2},
        "forecast.json": {"rank": 0, "parameters_bytes": 3_000_000, "optimizer_bytes": 6_800_000, "wire_bytes": wire},
        "timeline.json": {
            "step": 3, "ranks_of_job": 2, "device": "cpu",
            "ranks": [{"rank": r, "left_out": 0, "spans": spans(0.001 * r)} for r in (0, 1)],
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def evil_run(folder: Path) -> Path:
    """Every text of every file, and the name of the run, is an attempt."""
    folder = whole_run(folder / EVIL.replace("/", "∕"))

    def worse(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: worse(v) for key, v in value.items()} | {EVIL: 1.5, "more": {EVIL: EVIL}}
        if isinstance(value, list):
            return [worse(v) for v in value]
        return EVIL if isinstance(value, str) else value

    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        if path.name == "timeline.json":
            for rank in content["ranks"]:
                rank["spans"] = [[*one[:2], EVIL, *one[3:]] for one in rank["spans"]]
        else:
            content = worse(content)
        path.write_text(json.dumps(content))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    with open(folder / "log.jsonl", "w") as file:
        for line in lines:
            file.write(json.dumps({**line, EVIL: 1.0, f"user/{EVIL}": 2.0}) + "\n")
    return folder
