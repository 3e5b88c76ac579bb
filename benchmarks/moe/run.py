"""``python -m benchmarks.moe``: measure, print, write RESULTS.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, keep, machine
from benchmarks.launch import ContenderError, run_ranks
from benchmarks.moe import contenders, parallel, report
from benchmarks.moe.shapes import ROUTINGS, Shape

RAW = ROOT / "build" / "benchmarks" / "moe.json"
WORKER = "benchmarks.moe.worker"
SECTIONS = ("speed", "memory", "parallel")
FEW_TOKENS = 64
SKEWED = {(8, 1), (8, 2), (64, 2)}
"""(experts, k) with which skewed routings are measured in the same rounds as the even one."""


def speed_cases(dtypes: list[str], experts: list[int], ks: list[int], tokens: int) -> list[tuple[Shape, list[str]]]:
    """Every shape with its routings; and one of few tokens, where a copy of the weights for each row is possible."""
    found = [
        (Shape(tokens=tokens, experts=e, k=k, dtype=dtype), list(ROUTINGS) if (e, k) in SKEWED else ["even"])
        for dtype in dtypes for e in experts for k in ks
    ]  # fmt: skip
    return found + [(Shape(tokens=min(FEW_TOKENS, tokens), dtype=dtype), ["even"]) for dtype in dtypes]


def run_speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for shape, routings in speed_cases(args.dtypes, args.experts, args.k, args.tokens):
        rounds = args.rounds if shape.tokens > FEW_TOKENS else 4 * args.rounds
        spec = {
            "section": "speed", "shape": shape.record(), "routings": routings, "rounds": rounds,
            "threads": args.threads, "names": list(contenders.CONTENDERS),
        }  # fmt: skip
        variables = {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
        records.append(run_ranks(WORKER, spec, 1, args.timeout, variables)[0])
        print(report.line(records[-1]), flush=True)
    return records


def run_memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for experts in args.experts:
        shape = Shape(tokens=args.tokens, experts=experts)
        for routing in ("even", "all"):
            for name in contenders.CONTENDERS:
                spec = {"section": "memory", "shape": shape.record(), "routing": routing, "name": name}
                figures = run_ranks(WORKER, spec, 1, args.timeout)[0]
                records.append({"shape": shape.record(), "routing": routing, "name": name, **figures})
        print(f"memory: {experts} experts done", file=sys.stderr, flush=True)
    return records


def run_parallel(args: argparse.Namespace) -> list[list[dict[str, Any]]]:
    records = []
    for dtype in args.dtypes:
        shape = Shape(tokens=args.tokens // 2, dtype=dtype)
        for routing in ROUTINGS:
            spec = {
                "section": "parallel", "shape": shape.record(), "routing": routing, "rounds": 3 * args.rounds,
                "names": list(parallel.CONTENDERS),
            }  # fmt: skip
            records.append(run_ranks(WORKER, spec, 2, args.timeout))
            print(report.parallel_line(records[-1]), flush=True)
    return records


def merged(old: list[Any], new: list[Any]) -> list[Any]:
    """Records of other shapes stay; those of the same one are replaced."""

    def key(record: Any) -> str:
        one = record[0] if isinstance(record, list) else record
        return json.dumps([one["shape"], one.get("routing"), one.get("name")], sort_keys=True)

    replaced = {key(record) for record in new}
    return [record for record in old if key(record) not in replaced] + new


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the section speed")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one process at most")
    parser.add_argument("--quick", action="store_true", help="one round of few tokens: does it run; keeps nothing")
    parser.add_argument("--raw", type=Path, default=RAW)
    parser.add_argument("--report-only", action="store_true", help="the tables from the last raw figures")
    parser.add_argument("--write-results", action="store_true", help="write RESULTS.md (its remarks are kept)")
    args = parser.parse_args(argv)
    if args.quick:
        args.tokens, args.rounds, args.experts, args.k = 256, 1, [8], [2]
    return args


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    raw: dict[str, Any] = json.loads(args.raw.read_text()) if args.raw.exists() and not args.quick else {}
    if not args.report_only:
        raw["machine"] = machine(["torch", "deepspeed", "transformers"])
        for name, run in (("speed", run_speed), ("memory", run_memory), ("parallel", run_parallel)):
            if name in args.sections:
                try:
                    raw[name] = merged(raw.get(name, []), run(args))
                except ContenderError as error:
                    print(f"{name} failed: {error}", file=sys.stderr, flush=True)
                    raise SystemExit(1) from error
                if not args.quick:
                    keep(raw, args.raw)
    print(report.tables(raw))
    if args.write_results:
        report.write(raw)
