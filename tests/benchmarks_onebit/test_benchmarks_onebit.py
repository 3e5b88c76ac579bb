"""benchmarks.onebit: a small run has every contender, and what is counted is what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_and_counts() -> None:
    raw = ROOT / "build/benchmarks/onebit.json"
    kept = raw.read_bytes() if raw.exists() else None
    try:
        command = [sys.executable, "-m", "benchmarks.onebit", "--numel", "300000", "--rounds", "2", "--mbit"]
        result = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stderr
        found = json.loads(raw.read_text())["links"]["loopback"]
    finally:
        if kept is not None:
            raw.write_bytes(kept)
    assert len(found["contenders"]) == 9
    for name, said in found["said"].items():
        for one in found["contenders"][name]:
            # The interface sees both ranks, headers, acknowledgements and two barriers; and what others send.
            assert one["bytes"] >= 2 * said, name
    assert found["said"]["zoo, 1 bit"] * 30 < found["said"]["gloo, fp32"]
    assert len(found["steps"]) == 4
    sent = {name: min(one["bytes"] for one in rounds) for name, rounds in found["steps"].items()}
    assert sent["zoo's hook, 1 bit"] * 8 < sent["no hook, fp32"]
