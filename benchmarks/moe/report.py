"""Tables and the page RESULTS.md from raw figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Spread, facts, table, write_page
from benchmarks.moe.contenders import BARE, FRESH
from benchmarks.moe.parallel import CONTENDERS as PARALLEL
from benchmarks.moe.shapes import Shape

PAGE = Path(__file__).with_name("RESULTS.md")
MIB = 2**20
TARGET = 0.9


def seconds_of(record: dict[str, Any], name: str, routing: str = "even", clock: str = "cpu") -> list[float]:
    """Of every round; empty if it was left out."""
    for found in record["seconds"]:
        if (found["name"], found["routing"]) == (name, routing):
            return list(found[clock])
    return []


def ratios(base: Sequence[float], seconds: Sequence[float]) -> Spread | None:
    """base ÷ seconds, round by round."""
    pairs = list(zip(base, seconds, strict=False))  # a slow one has fewer rounds
    return Spread(tuple(b / s for b, s in pairs)) if pairs else None


def cell(spread: Spread | None) -> str:
    return "–" if spread is None else spread.text()


def peers(records: Sequence[dict[str, Any]]) -> list[str]:
    """Names in the order of their first appearance, without zoo and the yardsticks."""
    names = [found["name"] for record in records for found in record["seconds"]]
    return [name for name in dict.fromkeys(names) if name not in (BARE, FRESH, "zoo")]


def order(record: dict[str, Any]) -> tuple[Any, ...]:
    shape = record["shape"]
    return shape["dtype"], -shape["tokens"], shape["experts"], shape["k"]


def speed_table(records: Sequence[dict[str, Any]], clock: str = "cpu") -> str:
    """Speed of each contender as a fraction of the bare products'."""
    others = peers(records)
    header = ["dtype", "T", "E", "k", "routing", "bare, ms", "bare, tokens/s", "products into new memory", "**zoo**",
              "zoo of those into new memory", *others]  # fmt: skip
    rows = []
    for record in sorted(records, key=order):
        shape = record["shape"]
        base = seconds_of(record, BARE, clock=clock)
        fresh = seconds_of(record, FRESH, clock=clock)
        for routing in dict.fromkeys(found["routing"] for found in record["seconds"]):
            ours = seconds_of(record, "zoo", routing, clock)
            rows.append([
                shape["dtype"], str(shape["tokens"]), str(shape["experts"]), str(shape["k"]), routing,
                f"{1e3 * statistics.median(base):.1f}", f"{shape['tokens'] / statistics.median(base):,.0f}",
                cell(ratios(base, fresh)), cell(ratios(base, ours)), cell(ratios(fresh, ours)),
                *(cell(ratios(base, seconds_of(record, name, routing, clock))) for name in others),
            ])  # fmt: skip
    return table(header, rows)


def best_of_transformers(record: dict[str, Any]) -> Spread | None:
    """Seconds of zoo ÷ those of the quickest implementation in each round, inverted: above 1 zoo is ahead."""
    names = [name for name in peers([record]) if name.startswith("transformers")]
    found = [ratios(seconds_of(record, name), seconds_of(record, "zoo")) for name in names]
    there = [spread for spread in found if spread is not None]
    return min(there, key=lambda spread: spread.median) if there else None


def targets_table(records: Sequence[dict[str, Any]]) -> str:
    """What was asked for, and what came out."""
    header = ["dtype", "T", "E", "k", f"of the bare products (target: {TARGET})", "of transformers' best (> 1)",
              "of DeepSpeed dropless", "of the layer by hand", "time skewed of even (most; ≤ 1)",
              "(all; ≤ 1)"]  # fmt: skip
    rows = []
    for record in sorted(records, key=order):
        shape, ours = record["shape"], seconds_of(record, "zoo")
        skews = [ratios(seconds_of(record, "zoo", routing), ours) for routing in ("most", "all")]  # time, not speed
        rows.append([
            shape["dtype"], str(shape["tokens"]), str(shape["experts"]), str(shape["k"]),
            cell(ratios(seconds_of(record, BARE), ours)), cell(best_of_transformers(record)),
            *(cell(ratios(seconds_of(record, name), ours)) for name in ("DeepSpeed", "by hand")), *map(cell, skews),
        ])  # fmt: skip
    return table(header, rows)


def memory_table(records: Sequence[dict[str, Any]]) -> str:
    header = ["contender", "E", "routing", "peak, MiB", "of it gradients of experts", "others, MiB",
              "in tensors of T·k·D", "in tensors of T·k·(D + 2H)"]  # fmt: skip
    rows = []
    for record in records:
        shape = Shape(**record["shape"])
        head = [record["name"], str(shape.experts), record["routing"]]
        if "left_out" in record:
            rows.append([*head, f"left out: {record['left_out']}", "", "", "", ""])
            continue
        rest = record["peak"] - record["gradients"]
        unit = shape.rows * shape.itemsize
        rows.append([
            *head, f"{record['peak'] / MIB:.0f}", f"{record['gradients'] / MIB:.0f}", f"{rest / MIB:.0f}",
            f"{rest / unit / shape.width:.1f}", f"{rest / unit / (shape.width + 2 * shape.hidden):.2f}",
        ])  # fmt: skip
    return table(header, rows)


def slowest(ranks: Sequence[dict[str, Any]], name: str, clock: str) -> list[float]:
    """Of every round the time of the rank that took longest; for CPU the sum over ranks."""
    together = max if clock == "wall" else sum
    return [together(of) for of in zip(*(rank["seconds"][name][clock] for rank in ranks), strict=True)]


def parallel_table(records: Sequence[Sequence[dict[str, Any]]]) -> str:
    header = ["dtype", "routing", "contender", "wall, ms", "wall of DeepSpeed's (target: ≤ 1)", "CPU of both ranks, ms",
              "CPU of DeepSpeed's", "bytes sent by rank 0, rank 1", "rows that leave, and their counts"]  # fmt: skip
    rows = []
    for ranks in records:
        shape = ranks[0]["shape"]
        for name in PARALLEL:
            head = [shape["dtype"], ranks[0]["routing"], name]
            if name in ranks[0]["left_out"]:
                rows.append([*head, f"left out: {ranks[0]['left_out'][name]}", *[""] * 5])
                continue
            cells = []
            for clock in ("wall", "cpu"):
                mine = slowest(ranks, name, clock)
                cells.append(Spread(tuple(mine)).text(0, 1e3))
                if "DeepSpeed" in ranks[0]["seconds"]:
                    cells.append(cell(ratios(mine, slowest(ranks, "DeepSpeed", clock))))
                else:
                    cells.append("–")
            sent = [rank["bytes"][name] for rank in ranks] if name in ranks[0]["bytes"] else []
            cells += [", ".join(f"{s[i]:,}" for s in sent) or "not counted" for i in (0, 1)] if sent else ["", ""]
            rows.append([*head, *cells])
    return table(header, rows)


def left_out(records: Sequence[dict[str, Any]]) -> list[str]:
    found = {}
    for record in records:
        shape = record["shape"]
        for name, why in record["left_out"].items():
            found[f"{shape['dtype']}, E={shape['experts']}, k={shape['k']}, {name}"] = why
    return [f"- {what}: {why}" for what, why in found.items()]


def line(record: dict[str, Any]) -> str:
    """A record as one line of text."""
    shape, base = record["shape"], seconds_of(record, BARE)
    parts = [f"{found['name']} {found['routing']} {spread.median:.2f}" for found in record["seconds"]
             if (spread := ratios(base, found["cpu"])) is not None]  # fmt: skip
    return f"{shape['dtype']} E={shape['experts']} k={shape['k']} T={shape['tokens']}: " + ", ".join(parts)


def parallel_line(ranks: Sequence[dict[str, Any]]) -> str:
    parts = [f"{name} {1e3 * statistics.median(slowest(ranks, name, 'wall')):.0f} ms" for name in ranks[0]["seconds"]]
    return f"2 ranks, {ranks[0]['shape']['dtype']}, {ranks[0]['routing']}: " + ", ".join(parts)


def tables(raw: dict[str, Any]) -> str:
    """All that was measured."""
    found = []
    if raw.get("speed"):
        found += ["## Speed", "", SPEED, "", targets_table(raw["speed"]), ""]
        found += ["All contenders, as fractions of the bare products' speed:", "", speed_table(raw["speed"])]
        if missing := left_out(raw["speed"]):
            found += ["", "Left out:", "", *missing]
    if raw.get("memory"):
        found += ["", "## Memory", "", MEMORY, "", memory_table(raw["memory"])]
    if raw.get("parallel"):
        found += ["", "## Expert parallelism", "", PARALLELISM, "", parallel_table(raw["parallel"])]
    return "\n".join(found)


SPEED = (
    "Forward and backward of one layer of SwiGLU experts, D = 512, H = 1024, tokens and weights of one dtype, one "
    "thread, CPU time. The bare products are those of an even routing and the router's, into memory that is kept; "
    "the others have to allocate what they return, as the second yardstick does. Every contender takes its turn in "
    "every round, and a ratio is of one round: median (smallest–largest). Above 1 zoo is faster. *even*: all experts "
    "have the same number of rows; *most*: 9 of 10 tokens go to the same k experts; *all*: all do."
)
MEMORY = (
    "bf16, T = 4096, k = 2. Growth of the resident set at its peak during one forward and backward in a fresh process "
    "(after two steps of 64 tokens)."
)
PARALLELISM = (
    "2 gloo processes of one thread on one machine, 8 experts, 4 on each rank, 2048 tokens a rank, k = 2. Wall time is "
    "that of the slower rank, CPU time the sum of both. With *all* every row goes to the experts of rank 0."
)


def write(raw: dict[str, Any], page: Path = PAGE) -> None:
    """The page; its remarks stay."""
    about = facts(raw["machine"])
    write_page(
        page, f"# Mixture of experts on the CPU\n\nWritten by `python -m benchmarks.moe`.\n\n{about}\n\n{tables(raw)}"
    )
