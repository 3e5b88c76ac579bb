"""Starts a worker in a fresh process and brings back what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT


class ContenderError(RuntimeError):
    """A contender could not be measured; the message ends with what it said last."""


def environment() -> dict[str, str]:
    """zoo from this checkout; DeepSpeed without an accelerator, whose compiler it would then ask for."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
        **os.environ,
        "PYTHONPATH": path,
        # DeepSpeed builds its extension on first use, with the ninja of this environment.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def run_worker(tasks: list[dict[str, Any]], timeout_s: float, *, go_on: bool = False) -> list[dict[str, Any]]:
    """One figure a task; with ``go_on`` an {"error": …} for those that fail.

    Raises:
        ContenderError: the worker failed or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log_path = Path(folder) / "figures.json", Path(folder) / "log"
        spec = json.dumps({"tasks": tasks, "go_on": go_on})
        command = [sys.executable, "-m", "benchmarks.io.worker", spec, str(out)]
        with log_path.open("w") as log:
            try:
                subprocess.run(
                    command, cwd=ROOT, env=environment(), stdout=log, stderr=log, timeout=timeout_s, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise ContenderError(f"the process did not end within {timeout_s:.0f} s") from error
        if not out.exists():
            said = log_path.read_text(errors="replace").strip().splitlines()[-8:]
            raise ContenderError("\n".join(said) or "the process ended without a word")
        figures: list[dict[str, Any]] = json.loads(out.read_text())
        return figures
