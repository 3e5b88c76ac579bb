"""zoo of this checkout and of another one, in one interleaved run, step by step.

::

    python -m benchmarks.commits ../zoo-before                         # every topic
    python -m benchmarks.commits ../zoo-before --topics zero pipe --runs 5

Both checkouts run at once, in processes of their own, and take turns: one does a step while the other waits
(:mod:`benchmarks.turns`). So a pair of steps is a fraction of a second apart, and a machine that is slow for a minute
is slow for both. The benchmark itself is this checkout's.

*CPU* is user + system of all ranks, *wall* the slowest rank's. The ratio is of the two steps of a pair, this one over
the other; the table has its median and the interval that holds the true median with 95 % (order statistics, over the
pairs of all runs). A run is a fresh start of all processes; who begins changes from run to run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import turns
from benchmarks.common import ROOT, interval, keep, table
from benchmarks.launch import ContenderError, Server

RAW = ROOT / "build" / "benchmarks" / "commits.json"
SOURCES = ("python", "moe", "compression", "cuda")
Parts = dict[str, dict[str, list[float]]]
"""Seconds by what was measured and how ("CPU", "wall"), one number a turn."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One start of a worker: ``parts`` reads what its ranks return."""

    name: str
    worker: str
    spec: dict[str, Any]
    size: int
    parts: Callable[[list[Any]], Parts]


def _over_ranks(ranks: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """From "cpu" and "wall" of each rank: the CPU seconds of all, and the wall time of the slowest."""
    cpu, wall = ([rank[key] for rank in ranks] for key in ("cpu", "wall"))
    return {
        "CPU": [sum(of) for of in zip(*cpu, strict=True)],
        "wall": [max(of) for of in zip(*wall, strict=True)],
    }


def _zero(args: argparse.Namespace) -> Iterator[Case]:
    gpt = {"layers": 12, "width": 256, "heads": 8, "batch": 1, "context": 128}
    for name, workload in (("gpt", gpt), ("200 x Linear(64)", "tiny")):
        for stage in (1, 2, 3):
            spec = {"section": "step", "workload": workload, "contender": f"zoo{stage}", "budget_s": args.budget}
            title = f"zero: {name}, stage {stage}"
            yield Case(
                name=title, worker="benchmarks.zero.worker", spec=spec, size=2,
                parts=lambda ranks, title=title: {title: _over_ranks([rank["by_step"] for rank in ranks])},
            )  # fmt: skip


def _host(args: argparse.Namespace) -> Iterator[Case]:
    for stage in (1, 2, 3):
        title = f"zero: a unit's forward and backward, stage {stage}, world 1"
        yield Case(
            name=title, worker="benchmarks.zero.worker", spec={"section": "unit", "stage": stage}, size=1,
            parts=lambda ranks, title=title: {title: _over_ranks([rank["by_step"] for rank in ranks])},
        )  # fmt: skip


def _pipe(args: argparse.Namespace) -> Iterator[Case]:
    from benchmarks.pipe.model import Shape

    names, spec = ["zoo 1F1B", "zoo interleaved"], {"section": "step", "shape": Shape().record()}
    yield Case(
        name="pipe", worker="benchmarks.pipe.worker", spec={**spec, "names": names, "rounds": args.rounds}, size=2,
        parts=lambda ranks: {f"pipe: {n}": _over_ranks([rank["seconds"][n] for rank in ranks]) for n in names},
    )  # fmt: skip


def _moe(args: argparse.Namespace) -> Iterator[Case]:
    from benchmarks.moe.shapes import Shape

    def of_speed(ranks: list[Any]) -> Parts:
        mine = [of for of in ranks[0]["seconds"] if of["name"] == "zoo"]
        return {f"moe: {dtype}, {of['routing']}": _over_ranks([of]) for of in mine}

    for dtype in args.dtypes:
        spec = {
            "section": "speed",
            "shape": Shape(tokens=args.tokens, dtype=dtype).record(),
            "routings": ["even", "most"],
            "names": ["zoo"],
        }
        yield Case(
            name=f"moe: {dtype}", worker="benchmarks.moe.worker", size=1, parts=of_speed,
            spec={**spec, "routings": ["even", "most"], "rounds": args.rounds, "threads": 1},
        )  # fmt: skip
    shape = Shape(tokens=args.tokens // 2, dtype=args.dtypes[0]).record()
    spec = {"section": "parallel", "shape": shape, "routing": "even", "names": ["zoo"]}
    yield Case(
        name="moe: 2 ranks", worker="benchmarks.moe.worker", spec={**spec, "rounds": args.rounds}, size=2,
        parts=lambda ranks: {"moe: 2 ranks": _over_ranks([rank["seconds"]["zoo"] for rank in ranks])},
    )  # fmt: skip


def _checkpointing(args: argparse.Namespace) -> Iterator[Case]:
    names = ["zoo", "zoo, in the background"]

    def parts(ranks: list[Any]) -> Parts:
        found = {}
        for name in names:
            for what in ("save", "load"):
                rounds = [
                    [{"cpu": of[name][f"{what}_cpu"], "wall": of[name][what]} for of in r["rounds"]] for r in ranks
                ]
                seconds = [{key: [of[key] for of in mine] for key in ("cpu", "wall")} for mine in rounds]
                found[f"checkpointing: {name}, {what}"] = _over_ranks(seconds)
        return found

    spec = {"folder": str(args.folder), "names": names, "num_bytes": args.num_bytes, "rounds": args.rounds}
    yield Case(name="checkpointing", worker="benchmarks.checkpointing.worker", spec=spec, size=2, parts=parts)


TOPICS = {"zero": _zero, "host": _host, "pipe": _pipe, "moe": _moe, "checkpointing": _checkpointing}


def variables(checkout: Path) -> dict[str, str]:
    """What makes a worker use zoo of that checkout.

    Raises:
        SystemExit: there is no zoo.
    """
    if not (checkout / "python" / "zoo" / "zero").is_dir():
        raise SystemExit(f"{checkout} is no checkout of zoo: there is no python/zoo/zero in it.")
    return {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *(checkout / name for name in SOURCES)]))}


class Pair:
    """The same worker in both checkouts."""

    def __init__(self, worker: str, other: Path) -> None:
        self._servers = Server(worker, variables(ROOT)), Server(worker, variables(other))

    def run(self, case: Case, first: int, timeout_s: float) -> tuple[Parts, Parts]:
        """What (this one, the other one) measures, in turns; ``first`` begins."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:
            turns.prepare(Path(folder), case.size)
            jobs = []
            for job, server in enumerate(self._servers):
                spec = {**case.spec, "variables": turns.variables(Path(folder), job, first)}
                if "folder" in spec:  # the jobs write there
                    spec["folder"] = str(Path(spec["folder"]) / f"job{job}")
                jobs.append(threads.submit(server.run, spec, case.size, timeout_s))
            this, other = (case.parts(job.result()) for job in jobs)
        return this, other

    def close(self) -> None:
        """End both."""
        for server in self._servers:
            server.close()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each start of a case."""
    records: list[dict[str, Any]] = []
    for topic in args.topics:
        pairs: dict[str, Pair] = {}
        for number in range(args.runs):
            for case in TOPICS[topic](args):
                print(f"\rrun {number + 1}/{args.runs} {case.name:<40}", end="", file=sys.stderr, flush=True)
                pair = pairs.setdefault(case.worker, Pair(case.worker, args.other.resolve()))
                try:
                    this, other = pair.run(case, number % 2, args.timeout)
                except ContenderError as error:
                    print(f"\n{case.name} failed: {error}", file=sys.stderr, flush=True)
                    continue
                records.append({"this": this, "other": other})
                keep(records, args.raw)
        for pair in pairs.values():
            pair.close()
    print(file=sys.stderr)
    return records


def report(records: Sequence[dict[str, Any]]) -> str:
    """A row for each part."""
    rows = []
    for name in dict.fromkeys(name for record in records for name in record["this"]):
        both = [(record["this"][name], record["other"][name]) for record in records if name in record["this"]]
        cells, num_pairs = [name], 0
        for key in ("CPU", "wall"):
            # One job may have a step more than the other: nobody waited for it.
            values = [a / b for this, other in both for a, b in zip(this[key], other[key], strict=False)]
            low, high = interval(values)
            cells.append(f"{statistics.median(values):.3f} [{low:.3f}, {high:.3f}]")
            num_pairs = len(values)
        rows.append([*cells, str(num_pairs)])
    return table(["this / other", "CPU", "wall", "pairs"], rows)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.commits", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("other", type=Path, help="another checkout, with its native extension built")
    parser.add_argument("--topics", nargs="+", choices=list(TOPICS), default=list(TOPICS))
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="turns of a run (zero: as many as --budget allows)")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of timed steps of a run of zero")
    parser.add_argument("--tokens", type=int, default=1024, help="of a layer of experts")
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"], help="of experts")
    parser.add_argument("--num-bytes", type=int, default=300_000_000, help="of a checkpoint")
    parser.add_argument("--folder", type=Path, default=None, help="for checkpoints")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one start at most")
    parser.add_argument("--raw", type=Path, default=RAW)
    parser.add_argument("--report-only", action="store_true", help="measure nothing, report what --raw holds")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parsed(argv)
    if args.report_only:
        print(report(json.loads(args.raw.read_text())))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.folder = Path(folder)
        print(report(measure(args)))


if __name__ == "__main__":
    main()
