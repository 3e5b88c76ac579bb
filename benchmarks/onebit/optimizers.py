"""``python -m benchmarks.onebit.optimizers``: what optimizers that compress send, take and come to; see README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Spread, facts, keep, machine, table, write_page
from benchmarks.launch import start
from benchmarks.onebit.contenders import ADAMW, BASE, CLASSES, LOCAL, ZERO_ONE
from benchmarks.onebit.link import LinkError, cable

from zoo.optim.sync_policy import ZeroOneSchedule

PAGE = Path(__file__).parent / "OPTIMIZERS.md"
RAW = ROOT / "build/benchmarks/onebit_optimizers.json"
PARTS = ["steps", "bytes", "digits"]
BIT_S = 1e-9
"""Seconds a bit at 1 Gbit/s."""
VARIANCE, MOMENTUM = "mean gradient", "momentum"


def _schedule(freeze: int, scaler: int) -> ZeroOneSchedule:
    return ZeroOneSchedule(
        var_freeze_step=freeze, var_update_scaler=16, local_step_scaler=scaler, local_step_clipper=16
    )


# Lu et al. 2022, section 6: BERT's rate warms up for 12,500 steps; the defaults of ds_config freeze at 100,000.
SCHEDULES = {
    "the defaults": (_schedule(100_000, 32_678), (118_000, 200_000)),
    "`var_freeze_step` 12,500": (_schedule(12_500, 32_678), (118_000,)),
    "all of them by 1/118": (_schedule(106, 277), (1_000,)),
}


def steps_of(links: Mapping[str, Any]) -> str:
    """A table for each link: a row for each contender and kind of step."""
    parts = []
    for link, found in links.items():
        adamw = {row["turn"]: row["s"] for row in found["steps"][ADAMW]}
        fp32 = found["steps"][ADAMW][0]["counted"]
        rows = []
        for name, steps in found["steps"].items():
            for kind in dict.fromkeys(row["kind"] for row in steps):
                of_kind = [row for row in steps if row["kind"] == kind]
                counted = statistics.median(row["counted"] for row in of_kind)
                cpu = statistics.median(row["cpu_s"] for row in of_kind)
                rows.append([
                    name, kind, str(len(of_kind)), f"{counted / 1e6:.3f}",
                    f"1/{fp32 / counted:.1f}" if counted else "0",
                    f"{statistics.median(row['bytes'] for row in of_kind) / 1e6:.3f}",
                    Spread(tuple(row["s"] for row in of_kind)).text(0, 1e3),
                    Spread(tuple(adamw[row["turn"]] / row["s"] for row in of_kind)).text(2), f"{cpu * 1e3:.0f}",
                    f"{(cpu + 8 * BIT_S * counted) * 1e3:.0f}",
                ])  # fmt: skip
        header = ["optimizer", "the step sends", "steps", "MB counted", "of fp32", "MB by the interface", "ms",
                  "times as fast as AdamW", "CPU ms", "ms, computed"]  # fmt: skip
        parts.append(f"### {found['numel']:,} parameters, {link}\n\n{table(header, rows)}\n")
    return "\n".join(parts)


def counts_of(schedule: ZeroOneSchedule, total: int) -> Counter[str]:
    """How many of the first ``total`` steps of 0/1 Adam send what."""
    steps = map(schedule.at, range(1, total + 1))
    return Counter(VARIANCE if now.variance else MOMENTUM if now.momentum else LOCAL for now in steps)


def share_of(counts: Mapping[str, int], sent: Mapping[str, float], fp32: float) -> float:
    """Bytes of these steps over those of as many with full gradients: ``sent`` and ``fp32`` bytes a step."""
    return sum(sent[kind] * count for kind, count in counts.items()) / (fp32 * sum(counts.values()))


def published(links: Mapping[str, Any]) -> str:
    """Bytes counted for each kind of step of 0/1 Adam, times how many the schedules have."""
    steps = next(iter(links.values()))["steps"]
    sent = {row["kind"]: row["counted"] for row in steps[ZERO_ONE]}
    rows = []
    for name, (schedule, totals) in SCHEDULES.items():
        for total in totals:
            counts = counts_of(schedule, total)
            share = share_of(counts, sent, steps[ADAMW][0]["counted"])
            each = (f"{counts[kind]:,}" for kind in (VARIANCE, MOMENTUM, LOCAL))
            rows.append([name, f"{total:,}", *each, f"1/{1 / share:.1f}"])
    header = ["schedule of 0/1 Adam", "steps", VARIANCE, MOMENTUM, LOCAL, "bytes of fp32's"]
    return f"### Over a run of 0/1 Adam\n\n{table(header, rows)}\n"


def run_of(job: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """What the optimizers came to."""
    by_name: dict[str, list[Any]] = {}
    for run in runs:
        by_name.setdefault(run["name"], []).append(run)
    rows = []
    for name, of_name in by_name.items():
        base = by_name.get(BASE.get(name, name), of_name)
        against = [
            f"{100 * (average(of_name, key) / average(base, key) - 1):+.2f} %" if base is not of_name else ""
            for key in ("held_out", "last")
        ]
        sent, cpu = mean_of(of_name, "sent"), mean_of(of_name, "cpu_s")
        total, of_base = cpu + 8 * BIT_S * sent, mean_of(base, "cpu_s") + 8 * BIT_S * mean_of(base, "sent")
        rows.append([
            name, f"{average(of_name, 'held_out'):.4f}", against[0], f"{average(of_name, 'last'):.4f}", against[1],
            f"{sent / 1e6:.3f}", f"1/{mean_of(base, 'sent') / sent:.1f}", f"{cpu * 1e3:.1f}", f"{total * 1e3:.1f}",
            f"{of_base / total:.2f}",
        ])  # fmt: skip
    steps, seeds = len(runs[0]["losses"]), len(by_name[runs[0]["name"]])
    header = ["optimizer", "held-out loss", "against its base", "loss of the last steps", "against its base",
              "MB a step", "of its base", "CPU ms a step", "ms a step, computed", "times as fast"]  # fmt: skip
    return f"### {job}: {steps} steps, seeds: {seeds}\n\n{table(header, rows)}\n"


def average(runs: Sequence[Mapping[str, Any]], key: str) -> float:
    """Over runs."""
    return statistics.mean(run[key] for run in runs)


def mean_of(runs: Sequence[Mapping[str, Any]], key: str) -> float:
    """Over runs and steps; of CPU time the median of each kind of step counts for all of that kind."""
    values = []
    for run in runs:
        if key != "cpu_s":
            values += run[key]
            continue
        medians = {k: statistics.median(s for s, of in zip(run[key], run["kinds"], strict=True) if of == k)
                   for k in set(run["kinds"])}  # fmt: skip
        values += [medians[k] for k in run["kinds"]]
    return statistics.mean(values)


def report(raw: Mapping[str, Any]) -> str:
    """What was measured so far."""
    parts = []
    if "links" in raw:
        parts += [steps_of(raw["links"]), published(raw["links"])]
    parts += [run_of(name, raw[name]) for name in ("bytes", "digits") if name in raw]
    return "\n".join(parts)


def intro(raw: Mapping[str, Any]) -> str:
    """Head of the page."""
    about = facts(raw["about"])
    return (
        "Written by `python -m benchmarks.onebit.optimizers`. Stage 0 on two gloo ranks, 1 thread each, fp32; "
        "contenders make a step each in turns, ratios are of one round: median (smallest–largest). *MB counted*: what "
        "a rank sends in a step, by `comm.log`; *by the interface*: what its counter has more afterwards (on loopback "
        "of both ranks, without what goes through shared memory). *Computed*: median CPU time of a rank, plus bytes "
        "at 1 Gbit/s, nothing overlapped, each step counted as what it was. Bases: Lamb of `OnebitLamb`, AdamW of the "
        f"others. Losses are of the mean of the ranks' parameters.\n\n{about}"
    )


def measure_links(args: argparse.Namespace) -> dict[str, Any]:
    """Steps over loopback and over the cable."""
    arguments = ["--size", args.size, "--rounds", str(args.rounds)]
    module = "benchmarks.onebit.training"
    links = {"loopback": start(module, [*arguments, "--device", "lo"], [()] * 2)}
    for mbit in args.mbit:
        try:
            with cable(mbit) as prefixes:
                given = [*arguments, "--device", "cable"]
                links[f"{mbit:,} Mbit/s"] = start(module, given, prefixes, "10.77.0.1", "cable")
        except LinkError as error:
            print(f"no cable of {mbit} Mbit/s: {error}", file=sys.stderr)
    return links


def measure_job(job: str, steps: int, seeds: int) -> list[Any]:
    """Each optimizer in processes of its own."""
    found: list[Any] = []
    for name in CLASSES:
        arguments = ["--job", job, "--steps", str(steps), "--seeds", *map(str, range(seeds)), "--only", name]
        found += start("benchmarks.onebit.converge", arguments, [()] * 2)
        keep_also({job: found})
    return found


def keep_also(more: Mapping[str, Any]) -> dict[str, Any]:
    """Everything measured so far, this too; a run that is cut off loses one contender."""
    raw = {**(json.loads(RAW.read_text()) if RAW.exists() else {}), **more}
    keep(raw, RAW)
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description="Optimizers that compress beside AdamW and LAMB.")
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=PARTS, help="what to measure now; the page has the rest as it was"
    )
    parser.add_argument("--size", choices=["full", "small"], default="full")
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--mbit", type=int, nargs="*", default=[1000], help="rates of the cable; none: loopback only")
    parser.add_argument("--bytes-steps", type=int, default=1200)
    parser.add_argument("--digits-steps", type=int, default=500)
    parser.add_argument("--write-results", action="store_true", help="write OPTIMIZERS.md (its remarks are kept)")
    args = parser.parse_args()
    if "steps" in args.parts:
        keep_also({"links": measure_links(args)})
    if "bytes" in args.parts:
        measure_job("bytes", args.bytes_steps, 1)
    if "digits" in args.parts:
        measure_job("digits", args.digits_steps, 2)
    raw = keep_also({"about": machine(["torch", "scikit-learn", "torchft"])})
    text = report(raw)
    print(text)
    if args.write_results:
        write_page(PAGE, f"# Optimizers that compress\n\n{intro(raw)}\n\n{text}")


if __name__ == "__main__":
    main()
