"""benchmarks.onebit: a small run has every contender, and what is counted is what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.launch import start
from benchmarks.onebit.optimizers import LOCAL, MOMENTUM, SCHEDULES, VARIANCE, counts_of, published, share_of, steps_of

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


@pytest.mark.slow
def test_steps_of_optimizers_send_what_their_kind_says() -> None:
    given = ["--size", "small", "--rounds", "18", "--device", "lo"]
    found = start("benchmarks.onebit.training", given, [()] * 2, timeout_s=600)
    fp32 = 4 * found["numel"]
    for name, steps in found["steps"].items():
        for one in steps:
            momentum = fp32 / 31 if "momentum" in one["kind"] else 0
            whole = fp32 if set(one["kind"].split()) & {"gradient", "variance", "parameters"} else 0
            assert whole <= one["counted"] <= whole + momentum, (name, one)
            assert (one["counted"] > whole) == bool(momentum), (name, one)
    kinds = {name: {one["kind"] for one in steps} for name, steps in found["steps"].items()}
    assert [len(kinds[n]) for n in ("AdamW", "OnebitAdam", "OnebitLamb", "ZeroOneAdam", "DiLoCo")] == [1, 1, 1, 3, 2]
    assert published({"loopback": found})
    assert steps_of({"loopback": found})


def test_the_published_schedule_sends_a_26th_of_fp32() -> None:
    sent = {VARIANCE: 4 + 4 / 31, MOMENTUM: 4 / 31, LOCAL: 0.0}
    counts = counts_of(SCHEDULES["the defaults"][0], 118_000)
    assert sum(counts.values()) == 118_000
    assert 0 < share_of(counts, sent, 4.0) <= 1 / 26
    last = counts_of(SCHEDULES["all of them by 1/118"][0], 106 + 277 + 20)
    assert last[LOCAL] == 10  # since step 106 + 277 every other one
