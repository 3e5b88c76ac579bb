"""Runs the contenders in turns, round after round, and reports medians and ratios.

Every contender of every round is a fresh process (a pair at world size 2). A round runs each contender once, so that
what the machine does meanwhile meets all of them alike; a ratio is taken within its round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, keep, machine
from benchmarks.launch import ContenderError, run_ranks
from benchmarks.zero.contenders import CONTENDERS
from benchmarks.zero.host import HOST_CONTENDERS
from benchmarks.zero.report import console, write_page
from benchmarks.zero.workloads import WORKER

SECTIONS = ("host", "tiny1", "tiny2", "gpt1", "gpt2", "states")
MEMORY_ONLY = ("ddp-view", "ddp-zero")  # peers of the memory table; at other workloads they would say nothing new
DEFAULT_RAW = ROOT / "build" / "benchmarks" / "zero.json"


Run = tuple[str, str, dict[str, Any], int]


def plan(sections: list[str], peers: list[str] | None, budget_s: float) -> Iterator[Run]:
    """(section, contender, spec, world size) of one round, in the order in which they run."""

    def wanted(name: str, own: bool) -> bool:
        return own or peers is None or name in peers

    for section in sections:
        if section == "host":
            for name in HOST_CONTENDERS:
                if wanted(name, name in ("zoo", "bare", "bare-gloo")):
                    yield section, name, {"section": "host", "contender": name}, 1
        elif section == "states":
            for stage in range(4):
                yield section, f"zoo{stage}", {"section": "states", "contender": f"zoo{stage}", "stage": stage}, 2
        else:
            workload, size = section[:-1], int(section[-1])
            for name, contender in CONTENDERS.items():
                if name in MEMORY_ONLY and section != "gpt2":
                    continue
                if wanted(name, not contender.peer or name == "ddp"):
                    spec = {"section": "step", "workload": workload, "contender": name, "budget_s": budget_s}
                    yield section, name, spec, size


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds: ``raw["rounds"][i][section][contender]`` is a list with one dict a rank."""
    without = [] if importlib.util.find_spec("deepspeed") else ["deepspeed", "ds1", "ds2", "ds3"]
    if without:
        print("deepspeed is not installed: its lines are left out (pip install deepspeed).", flush=True)
    raw: dict[str, Any] = {"machine": machine(["torch", "deepspeed"]), "rounds": [], "failures": {}, "load": []}
    for number in range(args.rounds):
        figures: dict[str, dict[str, Any]] = {}
        raw["rounds"].append(figures)
        raw["load"].append(os.getloadavg()[0])
        for section, name, spec, size in plan(args.sections, args.peers, args.budget):
            if name in without or (section == "states" and number >= args.states_rounds):
                continue
            print(f"\rround {number + 1}/{args.rounds} {section} {name:<12}", end="", file=sys.stderr, flush=True)
            try:
                figures.setdefault(section, {})[name] = run_ranks(WORKER, spec, size)
            except ContenderError as error:
                raw["failures"][f"{section} {name}"] = str(error)
                print(f"\n{section} {name} failed: {error}", file=sys.stderr, flush=True)
            keep(raw, args.raw)
    print(file=sys.stderr)
    return raw


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of few steps: does it run, not what is it")
    parser.add_argument("--rounds", type=int, default=None, help="default 5, 1 with --quick")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--peers", nargs="*", default=None,
        help="only these of the peers: " + " ".join(n for n, c in CONTENDERS.items() if c.peer) + " deepspeed fsdp2",
    )  # fmt: skip
    parser.add_argument("--budget", type=float, default=None, help="seconds of timed steps (default 3; 0 quick)")
    parser.add_argument("--raw", type=Path, default=DEFAULT_RAW, help="where the raw rounds go, as JSON")
    parser.add_argument("--report-only", action="store_true", help="measure nothing, report what --raw holds")
    parser.add_argument("--write-results", action="store_true", help="write RESULTS.md (its remarks are kept)")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.budget = args.budget if args.budget is not None else (0.0 if args.quick else 3.0)
    args.states_rounds = 1  # bytes of tensors do not vary
    raw = json.loads(args.raw.read_text()) if args.report_only else measure(args)
    print(console(raw))
    if args.write_results:
        print(f"written: {write_page(raw).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
