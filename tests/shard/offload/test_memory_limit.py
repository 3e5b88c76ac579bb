"""A model whose states are several times larger than what its process may allocate trains, and trains the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT_MIB = 128


def run(folder: Path, limit_mib: int, layers: int, steps: int, *more: str) -> dict[str, Any]:
    script = Path(__file__).with_name("limited.py")
    # An interpreter of its own: what a forked process has inherited counts too, and lies where it cannot be used.
    command = [sys.executable, str(script), str(folder), str(limit_mib), "1024", str(layers), str(steps), *more]
    said = subprocess.run(command, timeout=500, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def check(folder: Path, layers: int, steps: int, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    limited, free = (run(folder, limit, layers, steps, *more) for limit in (LIMIT_MIB, 0))
    assert limited["losses"] == free["losses"]
    assert len(set(free["losses"])) == len(free["losses"])
    assert limited["states_bytes"] == free["states_bytes"]
    return limited, free


@pytest.mark.slow
def test_states_of_four_times_the_memory_that_is_left(tmp_path: Path) -> None:
    limited, free = check(tmp_path, layers=34, steps=2)
    assert limited["states_bytes"] >= 4 * LIMIT_MIB * 2**20
    assert free["rss_growth_bytes"] >= free["states_bytes"]


@pytest.mark.slow
def test_masters_of_a_model_in_fp32_go_to_nvme_bucket_by_bucket(tmp_path: Path) -> None:
    limited, _ = check(tmp_path, 34, 2, "bfloat16")
    assert limited["states_bytes"] >= 4 * LIMIT_MIB * 2**20


@pytest.mark.slow
def test_states_of_four_times_all_memory_of_the_process(tmp_path: Path) -> None:
    """As above, with the limit counting torch and everything else that the process has: about 5 GB against 1.1 GB."""
    limited, _ = check(tmp_path, layers=304, steps=4)
    assert limited["states_bytes"] >= 4 * limited["limit_bytes"]
