"""``python -m benchmarks.checkpointing.one_of_many``: what a checkpoint of 1,024 ranks costs one of them.

1,024 simulated ranks save real files; every tensor is cut in as many runs, as at stage 3 with a bucket a tensor. A new
process then opens the checkpoint and reads what rank 512 of 1,023 would have: no run of it is one that was saved.
It opens all alone, so that it reads manifest and index, checks the index, and looks at all 1,024 files: more than any
rank of many does. CPU seconds are those of that, of all its threads; importing is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.common import ROOT, table
from benchmarks.launch import environment

from zoo import sim
from zoo.checkpointing import load, save
from zoo.comm import Communicator
from zoo.layout import StateSlice, Stored

WRITERS, READERS, READER, LIMIT_S = 1024, 1023, 512, 2.0
ROLES = ("parameter", "exp_avg", "exp_avg_sq")


def run(name: str, role: str, start: int, length: int, numel: int) -> StateSlice:
    """Elements of a tensor in a role; each is its own number, plus that of its role."""

    def load(first: int, count: int) -> torch.Tensor:
        return torch.arange(first, first + count, dtype=torch.float32) + ROLES.index(role)

    return StateSlice(name, role, start, length, (numel,), Stored(load, torch.float32, start, length))


def runs_of(rank: int, size: int, tensors: int, numel: int) -> list[StateSlice]:
    """This rank's part of each tensor in each role."""
    low, high = (numel * place // size for place in (rank, rank + 1))
    return [run(f"layer.{t}.weight", role, low, high - low, numel) for t in range(tensors) for role in ROLES]


def write(folder: Path, tensors: int, numel: int) -> float:
    """Save; wall seconds of all ranks together."""
    began = time.perf_counter()

    def job(rank: int) -> None:
        save(folder, "one", runs_of(rank, WRITERS, tensors, numel), {"step": 1}, comm=Communicator())

    sim.run(WRITERS, job, timeout_s=1e9)
    return time.perf_counter() - began


def read(folder: Path, tensors: int, numel: int) -> dict[str, float]:
    """CPU seconds of opening and of reading, and wall seconds of both."""
    load(folder).close()  # what torch, numpy and the kernels do once
    wanted = runs_of(READER, READERS, tensors, numel)
    cpu, began = time.process_time(), time.perf_counter()
    with load(folder) as found:
        opened = time.process_time()
        values = [found.read(run.name, run.role, run.start, run.length) for run in wanted]
        done, wall = time.process_time(), time.perf_counter()
        figures = {"open": opened - cpu, "read": done - opened, "wall": wall - began, "files": float(len(found._files))}
        figures["pieces"] = float(len(found.index.columns["state"]))
    for run, value in zip(wanted, values, strict=True):
        if not torch.equal(value, run.tensor):
            raise AssertionError(f"{run} was read as something else")
    return figures


def main(argv: list[str] | None = None) -> None:
    """Write once, read in processes of their own, print a row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpointing.one_of_many")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is used")
    parser.add_argument("--tensors", type=int, default=350)
    parser.add_argument("--numel", type=int, default=16_381, help="of each; no multiple of the ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--read", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.read is not None:
        print(json.dumps(read(args.read, args.tensors, args.numel)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        saved_s = write(Path(folder), args.tensors, args.numel)
        num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        command = [sys.executable, "-m", "benchmarks.checkpointing.one_of_many", "--read", folder,
                   "--tensors", str(args.tensors), "--numel", str(args.numel)]  # fmt: skip
        rounds = []
        for _ in range(args.rounds):
            done = subprocess.run(command, cwd=ROOT, env=environment(0, 1), check=True, capture_output=True, text=True)
            rounds.append(json.loads(done.stdout.splitlines()[-1]))
    middle = {what: statistics.median(one[what] for one in rounds) for what in rounds[0]}
    most = max(one["open"] + one["read"] for one in rounds)
    head = ["pieces", "files", "MB", "files that are read", "open, CPU s", "read, CPU s", "both at most", "wall, s",
            "saving, s"]  # fmt: skip
    row = [
        f"{middle['pieces']:,.0f}", f"{WRITERS:,}", f"{num_bytes / 1e6:.0f}", f"{middle['files']:.0f}",
        f"{middle['open']:.2f}", f"{middle['read']:.2f}", f"{most:.2f}", f"{middle['wall']:.2f}", f"{saved_s:.0f}",
    ]  # fmt: skip
    print(table(head, [row]))
    met = "met" if most <= LIMIT_S else "**missed**"
    print(f"\n{met}: {most:.2f} s of CPU, target {LIMIT_S:.0f} s, {len(rounds)} rounds")


if __name__ == "__main__":
    main()
