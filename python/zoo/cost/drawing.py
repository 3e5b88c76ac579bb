"""A timeline as an SVG picture: for each rank what it computes, when it waits, and what its links do."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from zoo.cost.events import Span, Timeline
from zoo.cost.writing import write_whole

__all__ = ["draw", "svg"]

COLOURS = {
    "compute": "#4f81bd", "wait": "#d0d0d0", "unshard": "#2e7d4f", "prefetch": "#6fae5a", "reduce": "#d98032",
    "publish": "#8064a2", "all_gather": "#2e7d4f", "reduce_scatter": "#d98032", "all_reduce": "#c0504d",
}  # fmt: skip
OTHER = "#9c8d5a"
WIDTH, LEFT, ROW, GAP = 960, 150, 26, 8
TICKS = 5
CRITICAL = "#b00020"


def draw(timeline: Timeline, path: str | Path, *, critical: bool = False, title: str = "") -> None:
    """Write a timeline as an SVG file; with ``critical`` what the end follows from has a red frame.

    Raises:
        ValueError: the name does not end in .svg, or nothing happens in the timeline.
    """
    place = Path(path)
    if place.suffix.lower() != ".svg":
        raise ValueError(f"{place}: a timeline is written as SVG; give a name that ends in .svg.")
    write_whole(place, svg(timeline, critical=critical, title=title))


def svg(timeline: Timeline, *, critical: bool = False, title: str = "") -> str:
    """The picture as text. One row is what a rank computes and waits for, one is each of its streams of messages."""
    spans = [span for span in timeline.spans if span.end_s > span.start_s]
    if not spans:
        raise ValueError("nothing takes time in this timeline: give the actions seconds (zoo.cost.seconds_on).")
    rows = _rows(spans)
    scale = (WIDTH - LEFT - 20) / timeline.makespan_s
    top = 58 if title else 36
    parts = [_bar(span, rows, scale, top) for span in spans]
    if critical:
        parts += [_frame(span, rows, scale, top) for span in timeline.critical_path() if span.end_s > span.start_s]
    names = [
        f'<text x="{LEFT - 8}" y="{top + y * (ROW + GAP) + ROW * 0.68:.1f}" text-anchor="end">{escape(name)}</text>'
        for y, name in enumerate(rows.values())
    ]
    height = top + len(rows) * (ROW + GAP) + 34
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>' if title else "",
    ]
    legend = _legend(spans, top - 12, critical)
    axis = _axis(timeline.makespan_s, scale, height)
    return "\n".join([*filter(None, head), *legend, *names, *parts, *axis, "</svg>", ""])


def _rows(spans: Sequence[Span]) -> dict[tuple[int, str], str]:
    """(rank, stream) → what stands beside the row, in the order of rows."""
    streams: dict[int, list[str]] = {}
    for span in spans:
        own = streams.setdefault(span.rank, [""])
        if span.stream not in ("", "wait") and span.stream not in own:
            own.append(span.stream)
    found = {}
    for rank in sorted(streams):
        for number, stream in enumerate(streams[rank]):
            link = "messages" if len(streams[rank]) == 2 else f"messages {number}"
            found[rank, stream] = f"rank {rank}, {'computes' if not stream else link}"
    return found


def _row_of(span: Span, rows: dict[tuple[int, str], str]) -> int:
    return list(rows).index((span.rank, "" if span.stream == "wait" else span.stream))


def _kind(span: Span) -> str:
    if span.stream in ("", "wait"):
        return span.stream or "compute"
    return next((kind for kind in COLOURS if kind in span.name), "message")


def _bar(span: Span, rows: dict[tuple[int, str], str], scale: float, top: int) -> str:
    x, y, width = _place(span, rows, scale, top)
    kind = _kind(span)
    label = span.name or kind
    said = f"{label}: {1e6 * span.start_s:.1f} to {1e6 * span.end_s:.1f} µs"
    text = ""
    if width > 6.4 * len(label) + 6:
        ink = "#333333" if kind == "wait" else "#ffffff"
        text = (
            f'<text x="{x + width / 2:.1f}" y="{y + ROW * 0.66:.1f}" text-anchor="middle" font-size="11" '
            f'fill="{ink}">{escape(label)}</text>'
        )
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.6):.1f}" height="{ROW}" fill="{COLOURS.get(kind, OTHER)}" '
        f'stroke="#ffffff" stroke-width="0.5"><title>{escape(said)}</title></rect>{text}'
    )


def _frame(span: Span, rows: dict[tuple[int, str], str], scale: float, top: int) -> str:
    x, y, width = _place(span, rows, scale, top)
    box = f'x="{x:.1f}" y="{y}" width="{max(width, 0.6):.1f}" height="{ROW}"'
    return f'<rect {box} fill="none" stroke="{CRITICAL}" stroke-width="2.5"/>'


def _place(span: Span, rows: dict[tuple[int, str], str], scale: float, top: int) -> tuple[float, int, float]:
    y = top + _row_of(span, rows) * (ROW + GAP)
    return LEFT + span.start_s * scale, y, (span.end_s - span.start_s) * scale


def _axis(makespan_s: float, scale: float, height: int) -> list[str]:
    y = height - 24
    found = [f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + makespan_s * scale:.1f}" y2="{y}" stroke="#333333"/>']
    unit, factor = ("ms", 1e3) if makespan_s > 2e-3 else ("µs", 1e6)
    for tick in range(TICKS + 1):
        seconds = makespan_s * tick / TICKS
        x = LEFT + seconds * scale
        anchor = "end" if tick == TICKS else "middle"
        found.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}" stroke="#333333"/>')
        found.append(f'<text x="{x:.1f}" y="{y + 17}" text-anchor="{anchor}">{seconds * factor:.3g} {unit}</text>')
    return found


def _legend(spans: Sequence[Span], y: int, critical: bool) -> list[str]:
    found, x = [], LEFT
    there = {_kind(span) for span in spans}
    for kind in [kind for kind in (*COLOURS, "message") if kind in there]:
        found.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{COLOURS.get(kind, OTHER)}"/>')
        found.append(f'<text x="{x + 16}" y="{y}">{escape(kind)}</text>')
        x += 34 + 7 * len(kind)
    if critical:
        box = f'x="{x}" y="{y - 10}" width="11" height="11"'
        found.append(f'<rect {box} fill="none" stroke="{CRITICAL}" stroke-width="2"/>')
        found.append(f'<text x="{x + 16}" y="{y}">critical path</text>')
    return found
