"""``python -m benchmarks.onebit``: see README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Spread, facts, keep, machine, table, write_page
from benchmarks.launch import start
from benchmarks.onebit.link import LinkError, cable
from benchmarks.onebit.steps import LAYERS, PLAIN, ROWS, WIDTH
from benchmarks.onebit.worker import GLOO

PAGE = Path(__file__).parent / "RESULTS.md"
RAW = ROOT / "build/benchmarks/onebit.json"
LOOPBACK = "loopback"


def run(args: argparse.Namespace, prefixes: Sequence[Sequence[str]], address: str, device: str) -> dict[str, Any]:
    """Both ranks; what rank 0 says."""
    given = ["--device", device, "--numel", str(args.numel), "--rounds", str(args.rounds)]
    given += ["--threads", str(args.threads), *(["--only", *args.only] if args.only else [])]
    found: dict[str, Any] = start("benchmarks.onebit.worker", given, prefixes, address, device)
    return found


def section(name: str, found: dict[str, Any], numel: int) -> str:
    """The tables of one link."""
    rows = []
    for contender, (times, ratios, cpu_s, sent) in summary(found["contenders"], GLOO).items():
        counted = found["said"].get(contender)
        rows.append([
            contender, times, ratios, cpu_s, "–" if counted is None else f"{counted / 1e6:.2f}", f"{sent / 1e6:.2f}",
            f"1/{4 * numel / sent:.1f}",
        ])  # fmt: skip
    header = ["contender", "ms", "times as fast as gloo", "CPU ms", "MB sent, counted", "by the interface", "of 4 n"]
    text = f"### {name}\n\n{table(header, rows)}\n"
    if "steps" not in found:
        return text
    rows = [
        [contender, *shown, f"{sent / 1e6:.2f}"] for contender, (*shown, sent) in summary(found["steps"], PLAIN).items()
    ]
    header = ["a step of a small model", "ms", "times as fast as without", "CPU ms", "MB by the interface"]
    return f"{text}\n{table(header, rows)}\n"


def summary(found: dict[str, list[dict[str, float]]], base: str) -> dict[str, tuple[str, str, str, float]]:
    """Of each contender: milliseconds, times as fast as ``base`` in the same round, CPU milliseconds, bytes."""
    shown = {}
    for contender, rounds in found.items():
        ratios = [b["s"] / r["s"] for b, r in zip(found.get(base, rounds), rounds, strict=True)]
        shown[contender] = (
            Spread(tuple(r["s"] for r in rounds)).text(1, 1e3), Spread(tuple(ratios)).text(2),
            f"{1e3 * statistics.median(r['cpu_s'] for r in rounds):.0f}", statistics.median(r["bytes"] for r in rounds),
        )  # fmt: skip
    return shown


def write(raw: dict[str, Any]) -> None:
    """The page; remarks stay."""
    about = facts(raw["about"])
    parts = [section(name, found, raw["numel"]) for name, found in raw["links"].items()]
    intro = (
        f"Written by `python -m benchmarks.onebit`. The mean of {raw['numel']:,} fp32 numbers on two gloo ranks, "
        f"{raw['threads']} thread each, contenders in turn, {raw['rounds']} rounds; ratios are of one round: median "
        "(smallest–largest). All work in place; a compressed mean includes the commit of its error, gloo's is a sum. "
        f"The small model: {LAYERS} layers of {WIDTH}×{WIDTH}, DistributedDataParallel, {ROWS} rows a rank, SGD."
    )
    write_page(PAGE, f"# Compressed communication\n\n{intro}\n\n{about}\n\n" + "\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compressed means beside gloo's all-reduce.")
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mbit", type=int, nargs="*", default=[1000], help="rates of the cable; none: loopback only")
    parser.add_argument("--only", nargs="*", default=[], help="names of contenders")
    parser.add_argument("--write-results", action="store_true", help="write RESULTS.md (its remarks are kept)")
    args = parser.parse_args()
    links = {LOOPBACK: run(args, [(), ()], "127.0.0.1", "lo")}
    for mbit in args.mbit:
        try:
            with cable(mbit) as prefixes:
                links[f"{mbit:,} Mbit/s"] = run(args, prefixes, "10.77.0.1", "cable")
        except LinkError as error:
            print(f"no cable of {mbit} Mbit/s: {error}", file=sys.stderr)
    raw = {
        "about": machine(["torch"]), "numel": args.numel, "rounds": args.rounds, "threads": args.threads, "links":
        links,
    }  # fmt: skip
    keep(raw, RAW)
    for name, found in links.items():
        print(section(name, found, args.numel))
    if args.write_results:
        write(raw)


if __name__ == "__main__":
    main()
