"""Memory over the seconds of a step, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zoo.compile.timeline import Moment

__all__ = ["draw"]

_COLOURS = ("#4f81bd", "#d98032")
_NAMES = ("parameters that are gathered", "values of the graphs")


def draw(moments: Sequence[Moment], path: Path, *, title: str) -> None:
    """Write a PNG, SVG or PDF file (by the suffix): gathered parameters, and on top of them what the graphs keep.

    Raises:
        ValueError: another suffix; or there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{path}: the suffix says what kind of file to write; it takes .png, .svg or .pdf.")
    if not moments:
        raise ValueError("there is no timeline to draw: no graph ran.")
    times, gathered, values = list[float](), list[float](), list[float]()
    for moment in moments:
        times += [1e3 * moment.start_s, 1e3 * moment.end_s]
        gathered += [moment.gathered_bytes / 2**20] * 2
        values += [moment.value_bytes / 2**20] * 2
    figure = Figure(figsize=(9.0, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    areas = axes.stackplot(times, gathered, values, colors=_COLOURS, labels=_NAMES, linewidth=0, step="post")
    for area, name in zip(areas, ("gathered", "values"), strict=True):
        area.set_gid(name)
    turn = next((moment.start_s for moment in moments if moment.backward), None)
    if turn is not None:
        axes.axvline(1e3 * turn, color="#222222", linewidth=0.8, linestyle=":")
        axes.annotate("backward", (1e3 * turn, 1.0), (3, -10), ("data", "axes fraction"), "offset points", fontsize=8)
    axes.set_xlim(0, times[-1])
    axes.set_ylim(0)
    axes.set_xlabel("milliseconds, foretold", fontsize=8)
    axes.set_ylabel("MiB", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    axes.set_title(title, fontsize=10, loc="left")
    figure.savefig(path)
