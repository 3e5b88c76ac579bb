"""What the page says runs as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.data_efficiency.tiny import BASE, start

PAGE = Path(__file__).parents[2] / "python/zoo/data_efficiency/README.md"


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_configuration() -> None:
    engine = start({**BASE, **json.loads(block("json"))})
    assert list(engine.parts) == ["curriculum_learning", "progressive_layer_drop", "data_efficiency"]
    engine.train_batch()
    assert engine.record is not None
    found = dict(engine.record.metrics)
    assert found["curriculum_learning/seqlen"] == 64
    assert found["progressive_layer_drop/theta"] == 1
    assert found["data_efficiency/random_ltd_tokens"] == 8


def test_the_analyser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    at_hand: dict[str, Any] = {}
    exec(block("python"), at_hand)
    assert at_hand["order"].about["metric"] == "seqlen"
