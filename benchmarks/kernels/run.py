"""``python -m benchmarks.kernels [--params N] [--rounds N] [--threads 1 2]``: measure, print, write RESULTS.md."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.kernels import contenders, layers, onebit, report
from benchmarks.kernels.yardstick import Yardstick

from zoo.kernels import loading

RAW = Path(__file__).with_name("raw.json")
SMALL = 4160
LOOP = "C loop"


def workloads(params: int) -> dict[str, tuple[str, list[int]]]:
    """Name → (kind, sizes). The small tensors are those of a model of many narrow layers: 4,807 of 4,160 elements."""
    return {
        "fp32, one tensor": ("fp32", [params]),
        "fp32, 168 tensors": ("fp32", [params // 168] * 168),
        f"fp32, 4,807 tensors of {SMALL:,}": ("fp32", [SMALL] * 4807),
        "mixed bf16, one tensor": ("mixed", [params]),
        "mixed bf16, 168 tensors": ("mixed", [params // 168] * 168),
        f"mixed bf16, 4,807 tensors of {SMALL:,}": ("mixed", [SMALL] * 4807),
    }


def interleaved(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contender in every round; the order within a round rotates."""
    names = list(steps)
    for name in names:
        steps[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def measure(params: int, rounds: int, threads: list[int]) -> list[dict[str, Any]]:
    """One record for each workload and number of threads."""
    yardstick = Yardstick()
    records = []
    for name, (kind, sizes) in workloads(params).items():
        make = contenders.fp32_steps if kind == "fp32" else contenders.mixed_steps
        steps, lists = make(sizes)
        steps = {LOOP: yardstick.fp32(lists) if kind == "fp32" else yardstick.mixed(lists), **steps}
        for count in threads:
            torch.set_num_threads(count)
            seconds = interleaved(steps, rounds)
            records.append({"workload": name, "threads": count, "elements": sum(sizes), "seconds": seconds})
            print(line(records[-1]), flush=True)
        del steps, lists
        gc.collect()
    return records


def line(record: dict[str, Any]) -> str:
    """A record as one line of text."""
    base = record["seconds"][LOOP]
    parts = []
    for name, seconds in record["seconds"].items():
        ratio = statistics.median(b / s for b, s in zip(base, seconds, strict=True))
        rate = 28 * record["elements"] / statistics.median(seconds) / 1e9
        parts.append(f"{name} {ratio:.2f} ({rate:.1f} GB/s)")
    return f"{record['workload']}, {record['threads']} thread(s): " + ", ".join(parts)


def require_native() -> None:
    """End unless the operations run natively: the references are not what is measured."""
    if not loading.native():
        raise SystemExit(f"zoo: nothing to measure: {loading.why_not() or 'ZOO_KERNELS=reference'}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    parser.add_argument("--params", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--report", action="store_true", help="write the page from the last measurement")
    parser.add_argument("--onebit", action="store_true", help="measure 1-bit compression again, keep the rest")
    parser.add_argument(
        "--layers", action="store_true", help="measure the layer operations on one thread, keep the rest"
    )
    args = parser.parse_args()
    if args.layers:
        require_native()
        report.write_layers(layers.section(layers.measure(args.rounds, limit_s=3.0), report.about("")))
        return
    if args.onebit:
        RAW.write_text(json.dumps({**json.loads(RAW.read_text()), "onebit": onebit.measure(args.rounds)}))
    elif not args.report:
        require_native()
        records = measure(args.params, args.rounds, sorted(set(args.threads)))
        RAW.write_text(
            json.dumps(
                {"about": report.about(Yardstick().about), "records": records, "onebit": onebit.measure(args.rounds)}
            )
        )
    report.write(json.loads(RAW.read_text()))
