"""``python -m benchmarks.io.warm FILE``: what remains of the differences when nobody is cold.

The main run measures one transfer of a fresh process. Here one process holds its buffers and handles, moves 1 GiB over
and over, and fio's jobs run between its transfers, in rotating order: the steady state of a training run. FILE lies on
the device, is created with 1 GiB when it is missing, and stays.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

import zoo.io

SIZE = 1 << 30
Figure = tuple[float, float]
"""GB/s and CPU-seconds a GB."""


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def zoo_transfer(handle: zoo.io.Handle, tensor: torch.Tensor, path: Path, operation: str) -> Figure:
    """One transfer of the whole tensor."""
    cpu, begun = cpu_s(), time.perf_counter()
    (handle.pwrite if operation == "write" else handle.pread)(tensor, path)
    wall = time.perf_counter() - begun
    return SIZE / wall / 1e9, (cpu_s() - cpu) / (SIZE / 1e9)


def fio_transfer(path: Path, operation: str, engine: str, *, huge: bool) -> Figure:
    """One job of 4 MiB x 32; io_uring with fixed buffers and registered files."""
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {}
    command = ["fio", "--name=warm", f"--filename={path}", f"--size={SIZE}", f"--rw={operation}", "--bs=4m"]
    command += ["--iodepth=32", f"--ioengine={engine}", "--direct=1", "--refill_buffers=0", "--scramble_buffers=0"]
    command += ["--overwrite=1", "--output-format=json"]
    command += ["--fixedbufs=1", "--registerfiles=1"] if engine == "io_uring" else []
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **tunables})
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job[operation]["runtime"] / 1e3
    return job[operation]["bw_bytes"] / 1e9, busy / (SIZE / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.io.warm")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    path: Path = arguments.file
    two = zoo.io.Handle(block_size=4 << 20, queue_depth=8, num_threads=2)
    one = zoo.io.Handle()
    pooled, ordinary = two.empty(SIZE, dtype=torch.uint8).fill_(7), torch.empty(SIZE, dtype=torch.uint8).fill_(9)
    two.pwrite(pooled, path)
    for operation in ("write", "read"):
        contenders: dict[str, Callable[[], Figure]] = {
            "zoo, pool buffer": lambda op=operation: zoo_transfer(two, pooled, path, op),
            "fio, io_uring, huge pages": lambda op=operation: fio_transfer(path, op, "io_uring", huge=True),
            "zoo, tensor": lambda op=operation: zoo_transfer(one, ordinary, path, op),
            "fio, libaio, huge pages": lambda op=operation: fio_transfer(path, op, "libaio", huge=True),
            "zoo, tensor, 2 threads": lambda op=operation: zoo_transfer(two, ordinary, path, op),
            "fio, io_uring": lambda op=operation: fio_transfer(path, op, "io_uring", huge=False),
        }
        report(operation, measure(contenders, arguments.rounds))
    one.close()
    two.close()


def measure(contenders: dict[str, Callable[[], Figure]], rounds: int) -> dict[str, list[Figure]]:
    """Every contender once a round, after one transfer that does not count."""
    names = list(contenders)
    for name in names:
        contenders[name]()
    found: dict[str, list[Figure]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(contenders[name]())
    return found


def report(operation: str, found: dict[str, list[Figure]]) -> None:
    """Medians, ranges, and the ratio to the fastest fio of the same round."""
    rounds = range(len(next(iter(found.values()))))
    best = [max(found[name][k][0] for name in found if name.startswith("fio")) for k in rounds]
    for name, figures in found.items():
        rates = [rate for rate, _ in figures]
        ratio = statistics.median(rate / top for rate, top in zip(rates, best, strict=True))
        cpu = statistics.median(cpu for _, cpu in figures)
        print(
            f"{operation:<6}{name:<28}{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f}) GB/s, "
            f"x fio's best {ratio:.2f}, {cpu:.3f} CPU s/GB"
        )


if __name__ == "__main__":
    main()
