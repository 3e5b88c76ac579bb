"""What a launcher itself costs: CPU seconds of ``zoo launch`` and of torchrun around ranks that do nothing.

``python -m benchmarks.launcher [--ranks 1 2 4] [--rounds 5]``. Both run in turns; seconds are user and system time of
the whole family of processes, the ranks' own start of Python included, which is the same in both. With ``--write`` the
table goes into RESULTS.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

ASKED_S = 0.3
"""What zoo launch may add to torchrun."""


def commands(ranks: int, script: str) -> dict[str, list[str]]:
    """What is compared."""
    return {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script],
        "zoo launch": ["-m", "zoo.cli", "launch", f"--ranks={ranks}", script],
    }


def cpu_seconds(command: Sequence[str]) -> float:
    """User and system time of a process and of all beneath it that were waited for.

    Raises:
        RuntimeError: it failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=os.environ, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(numbers: Sequence[int], rounds: int) -> list[tuple[int, float, float]]:
    """(ranks, median of torchrun, median of zoo launch), in seconds."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "nothing.py")
        script.write_text("")
        for ranks in numbers:
            taken: dict[str, list[float]] = {name: [] for name in commands(ranks, str(script))}
            for _ in range(rounds):
                for name, command in commands(ranks, str(script)).items():
                    taken[name].append(cpu_seconds(command))
            found.append((ranks, statistics.median(taken["torchrun"]), statistics.median(taken["zoo launch"])))
    return found


def page(rows: Sequence[tuple[int, float, float]], rounds: int) -> str:
    """RESULTS.md."""
    lines = [
        "# What a launcher costs", "",
        f"Written by `python -m benchmarks.launcher --write`. CPU seconds around ranks that do nothing, the median of "
        f"{rounds} rounds in turns; the machine need not be idle for these.", "",
        f"- cores: {os.cpu_count()}", f"- python: {platform.python_version()}", f"- torch: {torch.__version__}",
        f"- date: {datetime.date.today()}", "",
        "| ranks | torchrun | zoo launch | added by zoo launch |", "|---|---|---|---|",
        *(f"| {ranks} | {theirs:.2f} | {ours:.2f} | {ours - theirs:+.2f} |" for ranks, theirs, ours in rows), "",
        f"Asked: at most {ASKED_S} s added.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="RESULTS.md too")
    given = parser.parse_args()
    rows = measure(given.ranks, given.rounds)
    text = page(rows, given.rounds)
    print(text)
    if given.write:
        (Path(__file__).parent / "RESULTS.md").write_text(text, encoding="utf-8")
    if any(ours - theirs > ASKED_S for _, theirs, ours in rows):
        raise SystemExit(f"zoo launch adds more than {ASKED_S} s.")


if __name__ == "__main__":
    main()
