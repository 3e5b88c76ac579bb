"""The examples of pages run as they stand, with what a reader has at hand already."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    """The Python examples of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_registry() -> None:
    class MyAdamW(torch.optim.AdamW):
        pass

    at_hand: dict[str, Any] = {"model": torch.nn.Linear(2, 2), "MyAdamW": MyAdamW}
    for block in blocks("python/zoo/registry/README.md"):
        exec(block, at_hand)
    assert at_hand["opt"].param_groups[0]["lr"] == 3e-4


def test_lr_schedules() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
    at_hand: dict[str, Any] = {"optimizer": optimizer, "loader": range(2000), "train": lambda batch: optimizer.step()}
    exec("from zoo.lr_schedules import OneCycle\n" + blocks("python/zoo/lr_schedules/README.md")[0], at_hand)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"train_batch_size": 8, "model": {"width": 3}}))
    monkeypatch.chdir(tmp_path)
    load_it, lamp, gate = blocks("python/zoo/config/README.md")
    at_hand: dict[str, Any] = {"ClassVar": ClassVar, "__name__": __name__}
    exec(load_it, at_hand)
    assert "zero_optimization.stage = 1" in capsys.readouterr().out
    exec(lamp, at_hand)
    document = {"train_batch_size": 8, "lamp": {"dimmer": {"enabled": True}, "warm_up": False}}
    with pytest.raises(ValueError, match=r"lamp\.dimmer\.enabled: given True; it waits for"):
        at_hand["load"](document, sections={"lamp": at_hand["Lamp"]})
    exec("from zoo.config import ComponentChoice\n" + gate, at_hand)
    assert at_hand["Gate"].model_validate({"type": "TopK"}).kind == "gate"
