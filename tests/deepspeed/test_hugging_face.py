"""What accelerate is told on machines without a GPU, and what a program says that was written for one with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zoo.deepspeed as deepspeed
from zoo import sim


def asked(rank: int, state: dict[str, Any]) -> dict[str, Any]:
    """What a PartialState that is being made holds after it has asked whether the ranks are joined."""
    state = dict(state)
    sys.modules["accelerate.state"] = SimpleNamespace(  # type: ignore[assignment]
        PartialState=SimpleNamespace(_shared_state=state)
    )
    assert deepspeed.comm.is_initialized()
    return state


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"backend": None, "distributed_type": "NO"}, True),  # it looks for a backend, and knows none
        ({}, False),  # there is none, or it has not begun
        ({"backend": None, "num_processes": 1}, False),  # it is made already: what it has said stays true
        ({"backend": "nccl"}, False),
    ],
)
def test_a_state_that_is_being_made_without_a_backend_is_told_it(
    before: dict[str, Any], after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace())
    [found] = sim.run(1, lambda rank: asked(rank, before))
    if after:
        assert found["backend"] == torch.distributed.Backend(found["backend"])
        assert {**found, "backend": None} == before
    else:
        assert found == before


def test_nccl_without_cuda_is_gloo_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    joined: list[Any] = []
    monkeypatch.setattr("zoo.comm.init_distributed", lambda backend, *_: joined.append(backend))
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        for backend in ("nccl", None, "gloo"):
            deepspeed.init_distributed(backend)
    assert joined == ["nccl", None, "gloo", "gloo", None, "gloo"]
    assert [record.getMessage() for record in caplog.records] == [
        "init_distributed('nccl'): there is no CUDA device here; the ranks join over gloo instead."
    ]


@pytest.mark.slow
def test_ranks_of_a_program_that_asks_for_nccl_join(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import deepspeed, sys, torch\n"
        "deepspeed.init_distributed('nccl')\n"
        "deepspeed.init_distributed('nccl')\n"
        "x = torch.ones(1)\n"
        "deepspeed.comm.all_reduce(x)\n"
        "sys.stdout.write(f'{torch.distributed.get_backend()} {int(x)}\\n')\n"
    )
    command = [sys.executable, "-m", "zoo.cli", "run", "--as-deepspeed", "--ranks", "2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["gloo", "2"] * 2, done.stderr[-2000:]
    assert done.stderr.count("there is no CUDA device here") == 2  # one line a rank
