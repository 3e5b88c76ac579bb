"""``deepspeed.runtime.fp16.loss_scaler`` against what DeepSpeed's classes did, written down."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import processes
from torch import nn
from zoo.deepspeed.runtime.fp16 import loss_scaler

ROWS = json.loads((Path(__file__).parent / "loss_scales.json").read_text())["rows"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["arguments"]))
def test_scales_move_as_those_of_deepspeed(row: dict[str, Any]) -> None:
    scaler = loss_scaler.CreateLossScaler(torch.half, 1.0, True, row["arguments"])
    for overflow, scale, lives, steps in row["steps"]:
        if scale is None:
            with pytest.raises(RuntimeError, match=r"smallest loss scale, 1\.0"):
                scaler.update_scale(overflow)
            return
        scaler.update_scale(overflow)
        assert (scaler.loss_scale, scaler.cur_hysteresis, scaler.cur_iter) == (scale, lives, steps)
    assert scaler.dynamic


def test_the_rows_have_the_end_of_the_scale_in_both_kinds() -> None:
    assert any(row["steps"][-1][1] is None for row in ROWS)
    assert any(step[1] == row["arguments"]["min_scale"] for row in ROWS for step in row["steps"])


def test_static_scales() -> None:
    for dtype, scale in ((torch.half, 8.0), (torch.bfloat16, 1.0), (torch.float32, 1.0)):
        made = loss_scaler.CreateLossScaler(dtype, 8.0, False, None)
        assert (type(made).__name__, made.loss_scale, made.dynamic) == ("LossScaler", scale, False)
    scaler = loss_scaler.LossScaler(4)
    assert isinstance(scaler, loss_scaler.LossScalerBase)
    x = torch.ones(2, requires_grad=True)
    scaler.backward(x.sum())
    assert x.grad.tolist() == [4.0, 4.0]
    assert [g.item() for g in scaler.scale_gradient(None, (torch.ones(1),), None)] == [4.0]
    scaler.update_scale(True)
    assert scaler.loss_scale == 4
    assert [loss_scaler.to_python_float(t) for t in (torch.tensor(2.5), torch.tensor([3]), [4])] == [2.5, 3.0, 4.0]
    assert not scaler.has_overflow([])
    with pytest.raises(ValueError, match="got no dynamic_loss_args"):
        loss_scaler.CreateLossScaler(torch.half, 1.0, True, None)


def test_gradients_that_are_not_finite_are_seen() -> None:
    scaler = loss_scaler.DynamicLossScaler(4, 2, 1, 1, False)
    p = nn.Parameter(torch.zeros(2))
    assert not scaler.has_overflow_serial([p])
    for value, found in ((1.0, False), (math.inf, True), (math.nan, True)):
        p.grad = torch.tensor([0.0, value])
        assert scaler.has_overflow_serial([p]) is found


CHECKPOINT = """
import sys
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
torch.save({"a": LossScaler(4), "b": DynamicLossScaler(16, 2, 1, 1, False)}, sys.argv[1])
torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler])
found = torch.load(sys.argv[1], weights_only=True)
assert (found["a"].loss_scale, found["b"].loss_scale, type(found["a"])) == (4, 16, LossScaler)
"""


def test_they_are_pickled_without_the_name() -> None:
    code = (
        "import pickle; from zoo.deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler\n"
        "one = DynamicLossScaler(16, 2, 1, 1, False); one.update_scale(True)\n"
        "again = pickle.loads(pickle.dumps(one))\n"
        "assert type(again) is DynamicLossScaler and vars(again) == vars(one)\n"
    )
    processes.run(code, check=True)


def test_a_checkpoint_names_them_as_deepspeeds_does(tmp_path: Path) -> None:
    code = "import zoo.deepspeed as d; d.install_as_deepspeed()" + CHECKPOINT
    processes.run(code, tmp_path / "f.pt", check=True)
    assert b"deepspeed.runtime.fp16.loss_scaler" in (tmp_path / "f.pt").read_bytes()
    with pytest.raises(pickle.UnpicklingError, match="LossScaler"):
        torch.load(tmp_path / "f.pt", weights_only=True)
