"""``python -m benchmarks.checkpointing``: measure, print, write RESULTS.md."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpointing.contenders import CONTENDERS
from benchmarks.common import ROOT, facts, keep, machine, table, write_page
from benchmarks.launch import run_ranks

RAW = ROOT / "build" / "benchmarks" / "checkpointing.json"
PAGE = Path(__file__).with_name("RESULTS.md")
DISK = "the disk"
OURS = ("zoo", "zoo, in the background")
SHARE, BLOCKED_S, BYTES, MEMORY = 0.8, 0.2, 1.02, 1.1


def values(ranks: list[dict[str, Any]], name: str, what: str) -> list[float]:
    """Round by round: seconds of the slowest rank, CPU seconds of all, bytes of the largest."""
    over = sum if what.endswith("cpu") else max
    rounds = zip(*(rank["rounds"] for rank in ranks), strict=True)
    return [over(of[name][what] for of in found) for found in rounds]


def middle(ranks: list[dict[str, Any]], name: str, what: str) -> float:
    return statistics.median(values(ranks, name, what))


def most_memory(ranks: list[dict[str, Any]], name: str, size: int) -> float:
    """Of a rank's state."""
    return max(values(ranks, name, "memory")) / (size / len(ranks))


def ratio(ranks: list[dict[str, Any]], name: str, what: str) -> float:
    """Of the disk's bandwidth, the median of the rounds."""
    pairs = zip(values(ranks, DISK, what), values(ranks, name, what), strict=True)
    return statistics.median(disk / found for disk, found in pairs)


def tables(raw: dict[str, Any]) -> str:
    """All that was measured."""
    ranks, size = raw["ranks"], raw["spec"]["num_bytes"]
    names = [name for name in ranks[0]["rounds"][0] if name != DISK]
    rows = [[DISK, f"{size / middle(ranks, DISK, 'save') / 1e9:.2f} GB/s", "", "", "", "",
             f"{size / middle(ranks, DISK, 'load') / 1e9:.2f} GB/s", "", "", ""]]  # fmt: skip
    for name in names:
        rows.append([
            name, f"{middle(ranks, name, 'save'):.2f}", f"{ratio(ranks, name, 'save'):.2f}",
            f"{middle(ranks, name, 'blocked'):.3f}", f"{middle(ranks, name, 'save_cpu'):.2f}",
            f"{most_memory(ranks, name, size):.2f}", f"{middle(ranks, name, 'load'):.2f}",
            f"{ratio(ranks, name, 'load'):.2f}", f"{middle(ranks, name, 'load_cpu'):.2f}",
            f"{middle(ranks, name, 'bytes') / size:.4f}",
        ])  # fmt: skip
    head = ["", "save, s", "of the disk", "blocked, s", "CPU of all, s", "memory, of a rank's state", "load, s",
            "of the disk", "CPU of all, s", "bytes, of the state"]  # fmt: skip
    lines = ["## Targets", "", *targets(ranks, size), "", "## Figures", "",
             f"{size / 1e9:.1f} GB on {len(ranks)} ranks, {len(ranks[0]['rounds'])} rounds, medians; ratios are of a "
             "round. Memory is the growth of a rank's resident set at its peak while it saves, the largest of all "
             "rounds: what is kept for the next save counts once.", "", table(head, rows)]  # fmt: skip
    lines += [f"- {name}: left out, {why}" for name, why in ranks[0]["left_out"].items()]
    return "\n".join(lines)


def targets(ranks: list[dict[str, Any]], size: int) -> list[str]:
    """What was asked for, and whether it was met, on medians."""

    def line(text: str, value: float, met: bool, limit: str) -> str:
        return f"- {text}: {'met' if met else '**missed**'} ({value:.3f}, target {limit})"

    there, found = ranks[0]["rounds"][0], []
    for what in ("save", "load") if OURS[0] in there else ():
        value = ratio(ranks, OURS[0], what)
        found.append(line(f"zoo's {what}, of the disk's bandwidth", value, value >= SHARE, f"≥ {SHARE}"))
    if OURS[1] in there:
        blocked, memory = middle(ranks, OURS[1], "blocked"), most_memory(ranks, OURS[1], size)
        text = "seconds that a save in the background blocks"
        found.append(line(text, blocked, blocked <= BLOCKED_S, f"≤ {BLOCKED_S}"))
        found.append(line("memory that it adds, of a rank's state", memory, memory <= MEMORY, f"≤ {MEMORY}"))
    if OURS[0] in there:
        num = middle(ranks, OURS[0], "bytes") / size
        found.append(line("bytes on disk, of the state", num, num <= BYTES, f"≤ {BYTES}"))
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure and print; keep the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpointing")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is measured")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--num-bytes", type=int, default=1_200_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--report-only", action="store_true", help="the tables from the last raw figures")
    parser.add_argument("--write-results", action="store_true", help="write RESULTS.md (its remarks are kept)")
    args = parser.parse_args(argv)
    if args.report_only:
        raw = json.loads(RAW.read_text())
    else:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            spec = {"folder": folder, "names": args.contenders, "num_bytes": args.num_bytes, "rounds": args.rounds}
            ranks = run_ranks("benchmarks.checkpointing.worker", spec, 2, args.timeout)
        raw = {"spec": spec, "ranks": ranks, "machine": machine(["torch", "deepspeed"])}
        keep(raw, RAW)
    print(tables(raw))
    if args.write_results:
        head = "# Checkpoints\n\nWritten by `python -m benchmarks.checkpointing`."
        write_page(PAGE, f"{head}\n\n{facts(raw['machine'])}\n\n{tables(raw)}")
