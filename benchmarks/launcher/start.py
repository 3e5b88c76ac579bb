"""What a start costs: the import of zoo over torch's own, and a job from its launch to the end of its first step.

``python -m benchmarks.launcher.start [--ranks 1 2 8] [--rounds 9] [--write]``. Contenders run in turns, each in fresh
processes. CPU seconds are user and system time of the whole family of processes. With ``--write`` the tables go into
START.md.
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
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from benchmarks.common import ROOT, Spread, table, write_page
from benchmarks.launch import environment

HERE = Path(__file__).parent
IMPORTS = {
    "torch": "import torch",
    "zoo.zero": "from zoo.zero import Stage3Optimizer",
    "zoo.engine": "from zoo.engine import Engine",
}
ASKED = 0.06
"""What the import of zoo.zero may add, of torch's own."""

TRIES = 3
"""Starts of one contender in one round, at most: gloo's teardown ends a process with SIGABRT now and then."""

Taken = tuple[float, float]  # CPU and wall seconds


def jobs(ranks: int) -> dict[str, list[str]]:
    """The command lines of a job's contenders."""
    programs = HERE / "programs"
    return {
        "torchrun, DDP": ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone",
                          str(programs / "ddp.py")],
        "zoo launch, DDP": ["-m", "zoo.cli", "launch", f"--ranks={ranks}", str(programs / "ddp.py")],
        "zoo launch, stage 2": ["-m", "zoo.cli", "launch", f"--ranks={ranks}", str(programs / "stage2.py")],
    }  # fmt: skip


def run(command: Sequence[str]) -> Taken:
    """CPU seconds of a process and of all beneath it that were waited for, and seconds until its end.

    Raises:
        RuntimeError: it failed.
    """
    inherited = {
        key: value
        for key, value in environment(0, 1).items()
        if not key.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_"))
    }
    inherited["PYTHONDONTWRITEBYTECODE"] = ""  # a start without compiled files is nobody's start
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=inherited, check=False
    )
    wall_s, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def in_turns(
    commands: Mapping[str, Sequence[str]], rounds: int, say: Callable[[str], None]
) -> tuple[dict[str, list[Taken]], dict[str, int]]:
    """Name → what each round took, and how many starts failed and were repeated. A first round, which fills caches,
    does not count."""
    taken: dict[str, list[Taken]] = {name: [] for name in commands}
    failed = dict.fromkeys(commands, 0)
    for number in range(rounds + 1):
        for name, command in commands.items():
            for tried in range(1, TRIES + 1):
                say(f"round {number} of {rounds}: {name}")
                try:
                    figures = run(command)
                    break
                except RuntimeError as error:
                    failed[name] += 1
                    print(f"\n{error}", file=sys.stderr)
                    if tried == TRIES:
                        raise
            if number:
                taken[name].append(figures)
    return taken, failed


def import_rows(taken: Mapping[str, Sequence[Taken]]) -> list[list[str]]:
    """A table's rows: CPU seconds of each import, and what it adds to torch's, of the same round."""
    alone = [cpu for cpu, _ in taken["torch"]]
    rows = []
    for name, figures in taken.items():
        seconds = [cpu for cpu, _ in figures]
        over = statistics.median(own - torchs for own, torchs in zip(seconds, alone, strict=True))
        of_torch = statistics.median((own - torchs) / torchs for own, torchs in zip(seconds, alone, strict=True))
        rows.append([name, Spread(tuple(seconds)).text(), f"{over:+.2f}", f"{of_torch:+.3f}"])
    return rows


def job_rows(ranks: int, taken: Mapping[str, Sequence[Taken]], failed: Mapping[str, int]) -> list[list[str]]:
    """A table's rows of one number of ranks."""
    rows = []
    for name, figures in taken.items():
        ratio = [own[0] / theirs[0] for own, theirs in zip(figures, taken["torchrun, DDP"], strict=True)]
        rows.append(
            [
                str(ranks),
                name,
                Spread(tuple(cpu for cpu, _ in figures)).text(),
                Spread(tuple(wall for _, wall in figures)).text(),
                f"{statistics.median(ratio):.2f}",
                str(failed[name]),
            ]
        )
    return rows  # fmt: skip


def page(imports: Sequence[Sequence[str]], started: Sequence[Sequence[str]], rounds: int) -> str:
    """START.md."""
    parts = [
        "# What a start costs",
        f"Written by `python -m benchmarks.launcher.start --write`: {rounds} rounds in turns, fresh processes, "
        "compiled Python files. Seconds are median (min–max).",
        f"- cores: {os.cpu_count()}\n- python: {platform.python_version()}\n- torch: {torch.__version__}\n"
        f"- date: {datetime.date.today()}",
        "## Imports, CPU seconds",
        table(["import", "CPU s", "over torch, s", "of torch's own"], imports),
        f"Asked: zoo.zero adds at most {ASKED} of torch's own import.",
        "## From launch to the end of the first step",
        "All processes of the job; ratios are CPU over torchrun's with DDP in the same round. A start that failed "
        "(gloo aborts in its teardown now and then) is repeated and counted.",
        table(["ranks", "job", "CPU s", "wall s", "CPU, of torchrun's", "starts that failed"], started),
    ]
    return "\n\n".join(parts)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="START.md too")
    given = parser.parse_args()

    def say(line: str) -> None:
        print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)

    imports = import_rows(in_turns({name: ["-c", line] for name, line in IMPORTS.items()}, given.rounds, say)[0])
    started = [row for ranks in given.ranks for row in job_rows(ranks, *in_turns(jobs(ranks), given.rounds, say))]
    text = page(imports, started, given.rounds)
    print(f"\n{text}")
    if given.write:
        write_page(HERE / "START.md", text)


if __name__ == "__main__":
    main()
