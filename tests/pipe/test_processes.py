"""The same on processes, over gloo."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tests.pipe.test_engine import batches, engine_of
from tests.pipe.test_faults import explode
from tests.pipe.test_training import Case, pipelined, reference
from tests.processes import run_ranks

CASES = [
    Case(schedule="1f1b", data=2, stage=3, tied=True, clip=0.1),
    Case(schedule="zb_v", data=2, stage=2, tied=True),
    Case(schedule="interleaved_1f1b", pipe=4, stage=1, num_blocks=8),
    Case(schedule="dualpipe_v", pipe=2, data=2, stage=0),
]


def trained(rank: int) -> Any:
    return [pipelined(case, rank)[:2] for case in CASES]


@pytest.mark.slow
def test_processes_train_as_one_does() -> None:
    ranks = list(run_ranks(4, trained).values())
    assert len(ranks) == 4
    for number, case in enumerate(CASES):
        losses, expected, _ = reference(case)
        for found in ranks:
            assert found[number][0] == pytest.approx(losses, rel=1e-5)
            for name, value in found[number][1].items():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


def failing(rank: int) -> Any:
    case = Case(pipe=3, num_micro=4)
    engine = engine_of(case)
    engine.train_batch(batches(case, engine))
    if rank == 1:
        engine.module._calls[engine.module.bounds[engine.module.stages[0]]].register_forward_hook(explode)
    begun = time.monotonic()
    try:
        engine.train_batch(batches(case, engine, 1))
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    return "nothing was raised", 0.0


@pytest.mark.slow
def test_an_exception_in_one_stage_is_raised_on_all_processes() -> None:
    for text, seconds in run_ranks(3, failing, group_timeout_s=10.0).values():
        assert "boom (in layer" in text
        assert seconds < 60
