"""A timeline as a picture: one row a rank, predicted above measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.pipe.schedules.table import Kind, Table
from zoo.pipe.simulate import Simulation, Span

__all__ = ["check_measured", "draw"]

COLOURS = {
    Kind.FORWARD: ("#4f81bd", "#a9c4e4"),
    Kind.BACKWARD: ("#4d9e5b", "#a8d5b0"),
    Kind.INPUT: ("#d98032", "#f2c091"),
    Kind.WEIGHT: ("#8064a2", "#c4b3d9"),
}
"""Of the stages of a rank the first has the first colour, the last one the second, those between what is between."""
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradient",
}
LARGEST_INCHES = 200.0
ONE_SCALE = 10.0
"""How many times as long as another a timeline may be on the same axis."""


def draw(
    simulation: Simulation, path: Path, *, measured: Sequence[Span] | None = None, title: str | None = None
) -> None:
    """Write a PNG or SVG file (by the suffix): the simulation, and below it on the same axis of time what was measured;
    on one of its own where the one is more than ten times as long as the other, as costs that nobody gave are seconds.

    A bar is a computation, with the number of its micro-batch; lighter colours are later stages of the same rank.

    Raises:
        ValueError: another suffix; or what was measured is not of this schedule.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{path}: the suffix says what kind of file to write; it takes .png, .svg or .pdf.")
    table = simulation.table
    panels: list[tuple[str, Sequence[Span]]] = [("predicted", simulation.spans)]
    if measured is not None:
        check_measured(table, measured)
        panels.append(("measured", from_zero(measured)))
    lengths = [_makespan(spans) or 1.0 for _, spans in panels]
    shared = max(lengths) <= ONE_SCALE * min(lengths)
    makespans = [max(lengths)] * len(panels) if shared else lengths
    width = _width(simulation)
    figure = Figure(figsize=(width, 1.3 + len(panels) * (0.55 + 0.32 * table.num_ranks)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, sharex=shared, squeeze=False)[:, 0]
    for axes, (name, spans), makespan in zip(all_axes, panels, makespans, strict=True):
        _panel(axes, table, spans, inches_per_s=(width - 1.5) / makespan)
        axes.set_xlim(0, makespan * 1.005)
        axes.set_title(f"{name}: {_makespan(spans):.4g} s, bubble {_bubble(table, spans):.1%}", fontsize=9, loc="left")
    all_axes[-1].set_xlabel("seconds")
    kinds = [kind for kind in Kind if any(s.computation.kind is kind for s in simulation.spans)]
    figure.legend(
        handles=[Patch(color=COLOURS[kind][0], label=NAMES[kind]) for kind in kinds],
        loc="outside upper right", ncols=len(kinds), fontsize=8, frameon=False,
    )  # fmt: skip
    figure.suptitle(title if title is not None else _title(table), fontsize=10, x=0.01, ha="left")
    figure.savefig(path)


def check_measured(table: Table, measured: Sequence[Span]) -> None:
    """Raise ValueError unless exactly the computations of the table were measured, on their ranks."""
    expected = {(rank, c) for rank, _, c in table.placed()}
    found = [(s.rank, s.computation) for s in measured]
    for what, some in (("has not", expected - set(found)), ("also has", set(found) - expected)):
        if some:
            rank, c = min(some)
            raise ValueError(
                f"the measured timeline {what} {c} on rank {rank}: it is of another schedule than {table.name}."
            )
    if len(found) > len(expected):
        raise ValueError("the measured timeline has computations twice: give the spans of one batch.")


def from_zero(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same spans, the first of which begins at 0."""
    first = min(s.start_s for s in spans)
    return tuple(Span(s.rank, s.computation, s.start_s - first, s.end_s - first) for s in spans)


def _width(simulation: Simulation) -> float:
    """In inches: wide enough for numbers in all bars but those, the shortest, that are a tenth of the work."""
    lengths = sorted(s.end_s - s.start_s for s in simulation.spans)
    whole, so_far = math.fsum(lengths), 0.0
    for length in lengths:
        so_far += length
        if so_far > whole / 10:
            return min(max(8.0, 1.5 + 0.21 * simulation.makespan_s / length), LARGEST_INCHES)
    return 8.0


def _panel(axes: Any, table: Table, spans: Sequence[Span], *, inches_per_s: float) -> None:
    bars: dict[tuple[int, Kind, float, bool], list[tuple[float, float]]] = {}
    for span in spans:
        stages = table.stages_of[span.rank]
        share = stages.index(span.computation.stage) / max(1, len(stages) - 1)
        length = span.end_s - span.start_s
        thin = length * inches_per_s < 0.03  # an edge would be all of it
        bars.setdefault((span.rank, span.computation.kind, share, thin), []).append((span.start_s, length))
        number = str(span.computation.micro_batch)
        if length * inches_per_s > 0.075 * len(number) + 0.02:
            axes.text(
                span.start_s + length / 2, span.rank, number, ha="center", va="center", fontsize=7,
                color="white" if share < 0.5 else "#222222", in_layout=False,
            )  # fmt: skip
    for (rank, kind, share, thin), found in bars.items():
        colour = _mix(*COLOURS[kind], share)
        axes.broken_barh(
            found, (rank - 0.43, 0.86), facecolor=colour, edgecolor=colour if thin else "white", linewidth=0.5
        )
    axes.set_yticks(range(table.num_ranks), [f"rank {rank}" for rank in range(table.num_ranks)], fontsize=8)
    axes.set_ylim(table.num_ranks - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _mix(first: str, second: str, share: float) -> tuple[float, ...]:
    a, b = ([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in (first, second))
    return tuple(x + (y - x) * share for x, y in zip(a, b, strict=True))


def _title(table: Table) -> str:
    stages = f", {table.num_stages} stages" if table.num_stages != table.num_ranks else ""
    ranks = f"{table.num_ranks} rank{'s' * (table.num_ranks > 1)}"
    return f"{table.name}: {ranks}{stages}, {table.num_micro_batches} micro-batch{'es' * (table.num_micro_batches > 1)}"


def _makespan(spans: Sequence[Span]) -> float:
    return max(s.end_s for s in spans)


def _bubble(table: Table, spans: Sequence[Span]) -> float:
    whole = table.num_ranks * _makespan(spans)
    return 1.0 - math.fsum(s.end_s - s.start_s for s in spans) / whole if whole > 0 else 0.0
