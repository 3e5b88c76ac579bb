"""``python -m benchmarks.pipe``: measure, print, write RESULTS.md, timelines and their pictures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, keep, machine
from benchmarks.launch import ContenderError, run_ranks
from benchmarks.pipe import report
from benchmarks.pipe.contenders import BOTH, CONTENDERS
from benchmarks.pipe.model import Shape
from benchmarks.pipe.step import check_losses
from benchmarks.pipe.timeline import SCHEDULES

RAW = ROOT / "build" / "benchmarks" / "pipe.json"
WORKER = "benchmarks.pipe.worker"
SLEEPS = (("1f1b", 4), ("interleaved_1f1b", 4), ("zb_h1", 4), ("zb_v", 4), ("1f1b", 8), ("zb_v", 8))
"""(schedule, ranks) with layers that sleep."""


def run_step(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All contenders in turn, in one process group of two."""
    spec = {"section": "step", "shape": shape_of(args).record(), "rounds": args.rounds, "names": args.contenders}
    ranks = run_ranks(WORKER, spec, 2, args.timeout)
    check_losses(ranks)
    return ranks


def run_memory(args: argparse.Namespace) -> list[dict[str, list[dict[str, Any]]]]:
    """Every contender in fresh processes, in every round."""
    rounds: list[dict[str, list[dict[str, Any]]]] = []
    for number in range(args.memory_rounds):
        figures = {}
        for name in args.contenders:
            if name != BOTH:
                print(f"\rmemory {number + 1}/{args.memory_rounds} {name:<20}", end="", file=sys.stderr, flush=True)
                spec = {"section": "memory", "shape": shape_of(args).record(), "name": name, "tensors": False}
                figures[name] = run_ranks(WORKER, spec, 2, args.timeout)
                if not number:  # the same in every round
                    counted = run_ranks(WORKER, {**spec, "tensors": True}, 2, args.timeout)
                    figures[name] = [{**a, **b} for a, b in zip(figures[name], counted, strict=True)]
        rounds.append(figures)
    print(file=sys.stderr)
    return rounds


def run_timeline(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The model on two ranks."""
    shape, records = shape_of(args), []
    for schedule in args.schedules:
        spec = {"section": "timeline", "shape": shape.record(), "schedule": schedule, "rounds": 2 * args.rounds}
        ranks = run_ranks(WORKER, spec, 2, args.timeout)
        records.append({**spec, "micro_batches": shape.micro_batches, "ranks": ranks})
        print(report.timeline_line(records[-1]), flush=True)
    return records


def run_sleeps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Layers that sleep, on more ranks than there may be cores."""
    records = []
    for schedule, size in SLEEPS:
        if schedule in args.schedules:
            spec = {"section": "sleeps", "schedule": schedule, "micro_batches": 2 * size, "rounds": args.sleep_rounds}
            records.append({**spec, "ranks": run_ranks(WORKER, spec, size, args.timeout)})
            print(report.timeline_line(records[-1]), flush=True)
    return records


SECTIONS = {"step": run_step, "memory": run_memory, "timeline": run_timeline, "sleeps": run_sleeps}


def shape_of(args: argparse.Namespace) -> Shape:
    return Shape(**{key: getattr(args, key) for key in Shape().record()})


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipe")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    for key, value in Shape().record().items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--memory-rounds", type=int, default=3)
    parser.add_argument("--sleep-rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one process at most")
    parser.add_argument("--quick", action="store_true", help="one round of a small model: does it run; keeps nothing")
    parser.add_argument("--raw", type=Path, default=RAW)
    parser.add_argument("--report-only", action="store_true", help="the tables from the last raw figures")
    parser.add_argument("--write-results", action="store_true", help="write RESULTS.md (its remarks are kept)")
    parser.add_argument("--pictures", type=Path, default=None, help="a folder for timelines (JSON) and their pictures")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds = args.memory_rounds = args.sleep_rounds = 1
        args.layers, args.width, args.context = 4, 64, 32
    return args


def save(args: argparse.Namespace, raw: dict[str, Any]) -> None:
    """Keep the figures."""
    if not args.quick:
        keep(raw, args.raw)


def main(argv: list[str] | None = None) -> None:
    """Sections that are asked for are measured again; the others stay as they are."""
    args = parsed(argv)
    raw: dict[str, Any] = json.loads(args.raw.read_text()) if args.raw.exists() and not args.quick else {}
    if not args.report_only:
        raw["machine"] = machine(["torch", "deepspeed"])
        for name, run in SECTIONS.items():
            if name in args.sections:
                try:
                    raw[name] = run(args)
                except ContenderError as error:
                    print(f"{name} failed: {error}", file=sys.stderr, flush=True)
                    raise SystemExit(1) from error
                save(args, raw)
    print(report.tables(raw))
    if args.write_results:
        report.write(raw)
    if args.pictures is not None:
        report.pictures(raw, args.pictures)
