"""Losses of the engine beside those of the real DeepSpeed, in the same run."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_those_of_deepspeed(stage: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "peer.py"), str(rank), str(port), str(stage)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for rank in ranks:
        said, errors = rank.communicate(timeout=600)
        assert rank.returncode == 0, errors
        curves = json.loads([line for line in said.splitlines() if line.startswith("{")][-1])
        assert len(curves["ours"]) == 40
        assert curves["ours"] == pytest.approx(curves["theirs"], rel=1e-6)
