"""A GPT of any shape under DDP and under zoo at stages 0 to 3, in the same rounds.

::

    python -m benchmarks.zero.compare                                  # 12 layers x 256, 2 ranks, 7 rounds
    python -m benchmarks.zero.compare --layers 4 --width 512 --batch 2
    python -m benchmarks.zero.compare --what tiny1 host

A round runs every contender once, in fresh processes. CPU time is user + system of the ranks' processes. Ratios are
taken within a round; tables show medians. Two commits are compared by ``python -m benchmarks.commits``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Spread, keep, table
from benchmarks.launch import ContenderError, Server
from benchmarks.zero.workloads import WORKER

CONTENDERS = ("ddp", "zoo0", "zoo1", "zoo2", "zoo3")
WHATS = ("gpt", "tiny1", "tiny2", "host")
TARGETS = {"zoo1": 1.0, "zoo2": 1.0, "zoo3": 1.2}
KEYS = (("cpu_s", "CPU"), ("wall_s", "wall"))
Rounds = list[dict[str, list[dict[str, Any]]]]


def specs(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(name, spec of a worker, number of ranks) of each contender of a round."""
    for what in args.what:
        for name in args.contenders:
            if what == "host" and name != "ddp":
                yield f"host {name}", {"section": "unit", "stage": int(name[-1])}, 1
            elif what == "gpt":
                shape = {k: getattr(args, k) for k in ("layers", "width", "heads", "batch", "context")}
                spec = {"section": "step", "workload": shape, "contender": name, "budget_s": args.budget}
                yield f"gpt {name}", spec, args.ranks
            elif what != "host" and (name != "ddp" or what == "tiny2"):
                spec = {"section": "step", "workload": "tiny", "contender": name, "budget_s": args.budget}
                yield f"{what} {name}", spec, int(what[-1])


def measure(args: argparse.Namespace) -> Rounds:
    """All rounds: ``rounds[i][name]`` is a list with one dict a rank."""
    server = Server(WORKER)
    rounds: Rounds = []
    for number in range(args.rounds):
        figures: dict[str, list[dict[str, Any]]] = {}
        rounds.append(figures)
        for name, spec, size in specs(args):
            print(f"\rround {number + 1}/{args.rounds} {name:<12}", end="", file=sys.stderr, flush=True)
            try:
                figures[name] = server.run(spec, size)
            except ContenderError as error:
                print(f"\n{name} failed: {error}", file=sys.stderr, flush=True)
        keep(rounds, args.raw)
    server.close()
    print(file=sys.stderr)
    return rounds


def mean_of(ranks: Sequence[Mapping[str, Any]], key: str) -> float:
    """The mean over the ranks."""
    return statistics.mean(float(rank[key]) for rank in ranks)


def ratios(rounds: Rounds, over: str, under: str, key: str) -> list[float]:
    """Of each round that has both."""
    return [mean_of(r[over], key) / mean_of(r[under], key) for r in rounds if over in r and under in r]


def _against_ddp(rounds: Rounds, what: str) -> str:
    names = sorted({name for figures in rounds for name in figures})
    rows = []
    for name in [n for n in names if n.split()[0] == what]:
        cells = [name.split()[1]]
        unit = 1e6 if what == "host" else 1e3
        for key, _ in KEYS:
            cells.append(Spread(tuple(mean_of(r[name], key) for r in rounds if name in r)).text(1, unit))
        for key, _ in KEYS:
            values = ratios(rounds, name, f"{what} ddp", key)
            cells.append(Spread(tuple(values)).text(3) if values else "")
        rows.append(cells)
    return table([what, "CPU ms (host: µs a unit)", "wall", "CPU, x DDP", "wall, x DDP"], rows)


def _targets(rounds: Rounds) -> str:
    lines = []
    for name, limit in TARGETS.items():
        for key, shown in KEYS:
            values = ratios(rounds, f"gpt {name}", "gpt ddp", key)
            if values:
                middle = statistics.median(values)
                verdict = "met" if middle <= limit else "missed"
                lines.append(f"{name}: {shown} at most {limit} x DDP: {verdict} ({middle:.3f})")
    return "\n".join(lines)


def report(rounds: Rounds) -> str:
    """The tables."""
    whats = [what for what in WHATS if any(name.split()[0] == what for figures in rounds for name in figures)]
    parts = [_against_ddp(rounds, what) for what in whats]
    return "\n\n".join(part for part in [*parts, _targets(rounds)] if part)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.zero.compare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    found.add_argument("--what", nargs="+", choices=WHATS, default=["gpt"], help="tiny1 and tiny2: 200 x Linear(64)")
    found.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    found.add_argument("--rounds", type=int, default=7)
    found.add_argument("--budget", type=float, default=3.0, help="seconds of timed steps")
    found.add_argument("--ranks", type=int, default=2)
    for name, value in (("layers", 12), ("width", 256), ("heads", 8), ("batch", 1), ("context", 128)):
        found.add_argument(f"--{name}", type=int, default=value)
    found.add_argument("--raw", type=Path, default=ROOT / "build" / "benchmarks" / "compare.json")
    found.add_argument("--report-only", action="store_true", help="measure nothing, report what --raw holds")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parser().parse_args(argv)
    print(report(json.loads(args.raw.read_text()) if args.report_only else measure(args)))


if __name__ == "__main__":
    main()
