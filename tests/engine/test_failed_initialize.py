"""After an ``initialize`` that raised the next one, which is right, is what the first would have been."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data_efficiency.tiny import BASE, Tiny, data, stage

from zoo.engine import Engine, initialize

PLD = {"progressive_layer_drop": {"enabled": True, "theta": 0.1, "gamma": 1.0}}


def losses(engine: Engine) -> list[float]:
    return [float(engine.train_batch()) for _ in range(3)]


def fails(_: Any) -> Any:
    raise ZeroDivisionError("in a schedule of the user's own")


@pytest.mark.matrix
@pytest.mark.parametrize("changes", [{}, PLD], ids=["plain", "parts"])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_model_can_be_used_again(number: int, changes: dict[str, Any]) -> None:
    config = {**BASE, **stage(number), **changes}
    expected = losses(initialize(config, Tiny(), training_data=data())[0])
    wrong: list[dict[str, Any]] = [{"training_data": 5}, {"training_data": data(), "lr_scheduler": fails}]
    model = Tiny()
    for given in wrong:
        with pytest.raises((ValueError, ZeroDivisionError)):
            initialize(config, model, **given)
    assert not any("_call_impl" in vars(block) for block in model.modules())
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert losses(initialize(config, model, training_data=data())[0]) == expected


def test_nothing_is_left_open_but_what_the_user_brought(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Watches:
        closed = False

        def write(self, record: Any) -> None:
            pass

        def close(self) -> None:
            self.closed = True

    sink, part = Watches(), Watches()
    config = {**BASE, "jsonl_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ValueError, match="training_data is a int"):
            initialize(config, Tiny(), training_data=5, sinks={"mine": sink}, parts={"part": part})
    assert len(os.listdir("/proc/self/fd")) == before
    assert not sink.closed
    assert not part.closed
    assert caplog.text == ""
