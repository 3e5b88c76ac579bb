"""Tables, the page RESULTS.md and pictures from raw figures. Ratios are of a round: median and 95 % interval."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import facts, interval, table, write_page
from benchmarks.pipe.contenders import BOTH, CONTENDERS, SERIAL
from benchmarks.pipe.model import Shape
from benchmarks.pipe.timeline import compare, own_ratios

PAGE = Path(__file__).with_name("RESULTS.md")
MIB = 2**20
CPU_TARGET = 1.05
MAKESPAN_TARGET = 0.05
OURS = ("zoo 1F1B", "zoo interleaved")
Ranks = Sequence[Mapping[str, Any]]


def cell(values: Sequence[float], digits: int = 3, factor: float = 1.0) -> str:
    """``median [low, high]``: the interval holds the true median with 95 %."""
    low, high = interval(values)
    return f"{statistics.median(values) * factor:.{digits}f} [{low * factor:.{digits}f}, {high * factor:.{digits}f}]"


def together(ranks: Ranks, name: str, clock: str) -> list[float]:
    """Of every round: CPU seconds of all ranks, wall seconds of the slowest one."""
    over = sum if clock == "cpu" else max
    return [over(of) for of in zip(*(rank["seconds"][name][clock] for rank in ranks), strict=True)]


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def best_peer(ranks: Ranks, clock: str) -> str | None:
    """The peer with the smallest median."""
    there = [name for name in ranks[0]["seconds"] if CONTENDERS[name].peer]
    return min(there, key=lambda name: statistics.median(together(ranks, name, clock)), default=None)


def step_table(ranks: Ranks) -> str:
    """Times of a step, and of the serial model's and the best peer's."""
    seconds = ranks[0]["seconds"]
    peer = best_peer(ranks, "wall")
    rows = []
    for name in seconds:
        cpu, wall = together(ranks, name, "cpu"), together(ranks, name, "wall")
        row = [name, cell(cpu, 1, 1e3)]
        for base in (SERIAL, BOTH):
            row.append(cell(ratios(cpu, together(ranks, base, "cpu"))) if base in seconds and base != name else "")
        row.append(cell(wall, 1, 1e3))
        row.append(cell(ratios(wall, together(ranks, peer, "wall"))) if peer and peer != name else "")
        rows.append(row)
    rows += [[name, f"left out: {why}", *[""] * 4] for name, why in ranks[0]["left_out"].items()]
    head = ["contender", "CPU, ms", f"of {SERIAL}", f"of {BOTH}", "wall, ms", f"of {peer or 'the best peer'}"]
    return table(head, rows)


def peaks(rounds: Sequence[Mapping[str, Any]], name: str, rank: int) -> list[float]:
    """Bytes, round by round."""
    return [r[name][rank]["peak"] for r in rounds if "peak" in r.get(name, [{}])[0]]


def memory_table(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Of both stages."""
    rows = []
    for name in rounds[0]:
        found = [[b / MIB for b in peaks(rounds, name, rank)] for rank in range(2)]
        cells = [
            f"{statistics.median(one):.1f} ({min(one):.1f}–{max(one):.1f})" if one else "left out" for one in found
        ]
        cells += [f"{of['tensors'] / MIB:.1f}" if "tensors" in of else "" for of in rounds[0][name][:2]]
        rows.append([name, *cells])
    return table(["contender", "stage 0, MiB", "stage 1, MiB", "tensors of stage 0, MiB", "of stage 1"], rows)


def verdict(text: str, value: float, limit: float, digits: int = 3) -> str:
    """A line for a target."""
    word = "met" if value <= limit else "**missed**"
    return f"- {text}: {word} ({value:.{digits}f}, target {limit:.{digits}f})"


def targets(raw: Mapping[str, Any]) -> list[str]:
    """What was asked for, and whether it was met, on medians."""
    lines = []
    if raw.get("step"):
        ranks = raw["step"]
        for name in OURS:
            if name in ranks[0]["seconds"]:
                value = statistics.median(ratios(together(ranks, name, "cpu"), together(ranks, SERIAL, "cpu")))
                lines.append(verdict(f"CPU time of {name} of the serial model's", value, CPU_TARGET))
                peer = best_peer(ranks, "wall")
                if peer is not None:
                    value = statistics.median(ratios(together(ranks, name, "wall"), together(ranks, peer, "wall")))
                    lines.append(verdict(f"step time of {name} of the best peer's ({peer})", value, 1.0))
    if raw.get("memory"):
        rounds = raw["memory"]
        found = {name: peaks(rounds, name, 0) for name in rounds[0] if CONTENDERS[name].peer}
        middles = {name: statistics.median(values) / MIB for name, values in found.items() if values}
        peer = min(middles, key=lambda name: middles[name], default=None)
        for name in OURS:
            if peer is not None and peaks(rounds, name, 0):
                value = statistics.median(peaks(rounds, name, 0)) / MIB
                lines.append(verdict(f"peak memory of stage 0 of {name}, MiB, {peer}", value, middles[peer], 1))
    for record in records_of(raw):
        middle = abs(statistics.median(compare(record)[1]) - 1)
        lines.append(verdict(f"makespan, {_what(record)}: away from the prediction", middle, MAKESPAN_TARGET))
    return lines


def records_of(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All timelines."""
    return [*raw.get("timeline", ()), *raw.get("sleeps", ())]


def _what(record: Mapping[str, Any]) -> str:
    of = "layers that sleep" if record["section"] == "sleeps" else "the model"
    return f"{record['schedule']}, {len(record['ranks'])} ranks, {of}"


def timeline_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Predicted and measured."""
    rows = []
    for record in records:
        predicted, found, _ = compare(record)
        rows.append([
            _what(record), str(record["micro_batches"]), f"{1e3 * predicted.makespan_s:.1f}", f"{predicted.bubble:.1%}",
            cell([ratio * predicted.makespan_s for ratio in found], 1, 1e3), cell(found), cell(own_ratios(record)),
            str(len(found)),
        ])  # fmt: skip
    head = ["what", "micro-batches", "predicted, ms", "bubble", "measured, ms", "measured / predicted",
            "from its own costs", "batches"]  # fmt: skip
    return table(head, rows)


def timeline_line(record: Mapping[str, Any]) -> str:
    """One line of text."""
    predicted, found, _ = compare(record)
    said = f"measured / predicted {cell(found)}, from its own costs {cell(own_ratios(record))}"
    return f"{_what(record)}: predicted {1e3 * predicted.makespan_s:.1f} ms, {said}"


def pictures(raw: Mapping[str, Any], folder: Path) -> None:
    """A timeline (JSON) and a picture (SVG, PNG) of the middle batch of every record."""
    from zoo.pipe.plot import draw, from_zero
    from zoo.pipe.simulate import write_spans

    folder.mkdir(parents=True, exist_ok=True)
    for record in records_of(raw):
        predicted, _, spans = compare(record)
        name = f"{record['section']}_{record['schedule']}_{len(record['ranks'])}"
        (folder / f"{name}.json").write_text(json.dumps(write_spans(from_zero(spans))))
        draw(predicted, folder / f"{name}.png", measured=spans)


def tables(raw: Mapping[str, Any]) -> str:
    """All that was measured."""
    found = ["## Targets", "", *targets(raw)]
    if raw.get("step"):
        shape = Shape(**raw["step"][0]["shape"])
        rounds = len(raw["step"][0]["seconds"][SERIAL]["cpu"])
        said = f"{_model(shape)} {STEP} {rounds} rounds."
        found += ["", "## A training step", "", said, "", step_table(raw["step"])]
    if raw.get("memory"):
        found += ["", "## Memory", "", f"{MEMORY} {len(raw['memory'])} rounds: median (smallest–largest).", ""]
        found.append(memory_table(raw["memory"]))
    if records_of(raw):
        found += ["", "## Timelines", "", TIMELINE, "", timeline_table(records_of(raw))]
    return "\n".join(found)


def _model(shape: Shape) -> str:
    return (
        f"A byte-level GPT of {shape.layers} blocks of width {shape.width} with {shape.heads} heads, context "
        f"{shape.context}, {shape.micro_batches} micro-batches of {shape.batch} sequences a step, fp32, torch's AdamW, "
        "cut into stages of equally many blocks (interleaved: two a rank)."
    )


STEP = (
    "Two gloo ranks of one thread on one machine. CPU time is user and system time of both processes, wall time that "
    "of the slower one. Contenders take turns in one process group; a turn is two steps, of which the second one "
    "counts, and a ratio is of one round: median and the interval that holds the true median with 95 %. *serial* is "
    "one process beside an idle one; *on both ranks at once*: each does the whole step, and half of their time counts: "
    "what the same work takes where the other core works too. Losses of the first steps are compared before."
)
MEMORY = (
    "Growth of the resident set of a rank at its peak, from before the model is built to the end of the third step, in "
    "fresh processes, the same model, after a small one was trained. *Tensors*: the bytes that torch's allocator had "
    "given at their peak, in one more process; what the C library keeps is left out. *serial* has the whole model."
)
TIMELINE = (
    "When computations began and ended on each rank, by the clock of the machine; to wait for a message is no part of "
    "a computation. *The model*: that of above; costs are those of every other batch (means over micro-batches, and of "
    "these the median over batches), and the batches between are compared with the makespan that is predicted from "
    "these, with transfers that take no time. In *from its own costs* each batch is compared with the simulation under "
    "its own mean costs: what the machine does differently from batch to batch is then left out, and waiting that the "
    "simulation does not know of is left. *Layers that sleep*: 60, 80 and 50 ms for F, I and W of what a rank has; "
    "nothing is fitted."
)


def write(raw: Mapping[str, Any], page: Path = PAGE) -> None:
    """The page; its remarks stay."""
    about = facts(raw["machine"])
    write_page(page, f"# Pipelines on the CPU\n\nWritten by `python -m benchmarks.pipe`.\n\n{about}\n\n{tables(raw)}")
