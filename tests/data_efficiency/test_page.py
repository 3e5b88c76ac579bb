"""What the page says runs as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.data_efficiency.tiny import BASE, start

from zoo.config import load

ROOT = Path(__file__).parents[2]


def block(language: str, page: str = "python/zoo/data_efficiency/README.md") -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
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


def test_the_sections_of_the_table() -> None:
    sections = json.loads(block("json", "docs/data_efficiency.md"))
    for section in sections:
        config = load({**BASE, **section})
        assert all(config.asks_for(name) for name in section)
    assert len(sections) == 5
