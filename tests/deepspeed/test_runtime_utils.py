"""``deepspeed.runtime.utils`` against what DeepSpeed's functions gave, written down; and ``deepspeed.utils.timer``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from zoo.deepspeed.runtime import utils
from zoo.deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer

BALANCED = json.loads((Path(__file__).parent / "partitions.json").read_text())["rows"]


@pytest.mark.parametrize("row", BALANCED, ids=lambda row: f"{row['weights']}/{row['parts']}")
def test_balanced_partitions_are_those_of_deepspeed(row: dict[str, Any]) -> None:
    assert utils.partition_balanced(row["weights"], row["parts"]) == row["bounds"]


@pytest.mark.parametrize(
    ("given", "clipped"),
    [
        ([3.0, 4.0], [0.6, 0.8]),
        ([0.3, 0.4], [0.3, 0.4]),
        ([1.0, math.nan], [math.nan, math.nan]),
        ([1.0, math.inf], [0.0, math.nan]),
    ],
)
def test_a_norm_that_is_not_finite_reaches_all_gradients(given: list[float], clipped: list[float]) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor(given)
    utils.clip_grad_norm_([parameter], 1.0)
    torch.testing.assert_close(parameter.grad, torch.tensor(clipped), equal_nan=True)


def test_a_timer_that_is_stopped_keeps_its_time_and_throughput_knows_whether_it_began() -> None:
    timer = SynchronizedWallClockTimer()("step")
    for given in ({"reset": True}, {"record": True}):
        timer.start()
        timer.stop(**given)
    assert timer.elapsed(reset=False) > 0
    assert timer.mean() * 2 == pytest.approx(timer.elapsed())
    for enabled in (False, True):
        throughput = ThroughputTimer(SimpleNamespace(enabled=enabled, synchronized=False), 1)
        assert not throughput.initialized
        throughput.start()
        assert throughput.initialized is enabled
