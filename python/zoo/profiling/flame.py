"""A flame graph of a profile: as one page, and as folded stacks for other programs (Gregg 2016, "The Flame Graph")."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from zoo.cost.operators import Work
from zoo.profiling.profile import Profile, written
from zoo.profiling.strings import number_to_string

__all__ = ["Measure", "flame_page", "folded_stacks"]

Measure = Literal["flops", "elementwise", "bytes"]

_MEASURES: dict[str, tuple[str, Callable[[Work], int]]] = {
    "flops": ("FLOPs", lambda work: work.flops),
    "elementwise": ("elementwise operations", lambda work: work.elementwise),
    "bytes": ("bytes read and written", lambda work: work.moved_bytes),
}
_THIN = 0.0005  # of the whole: what is narrower is no pixel


class _Frame:
    """A module on one way, with what was done in it and in what it called."""

    def __init__(self) -> None:
        self.own, self.whole = 0, 0
        self.below: dict[str, _Frame] = {}


def _value(measure: str) -> tuple[str, Callable[[Work], int]]:
    if measure not in _MEASURES:
        raise ValueError(f"measure={measure!r}; allowed are {', '.join(map(repr, _MEASURES))}.")
    return _MEASURES[measure]


def folded_stacks(profile: Profile, measure: Measure = "flops") -> str:
    """A line for each way through modules, "model;layers;0 1024": what was done there and in no module below, in
    forward, backward and recomputation. flamegraph.pl and speedscope read it.

    Raises:
        ValueError: an unknown measure.
    """
    _, value = _value(measure)
    lines = [f"{';'.join(way)} {value(work)}" for way, work in profile.folded.items() if value(work)]
    return "\n".join(lines) + "\n" if lines else ""


def flame_page(profile: Profile, path: str | Path | None = None, measure: Measure = "flops") -> str:
    """The flame graph as one page of HTML that needs nothing else; written to ``path`` where one is given.

    A bar is as wide as its part of the whole. A click on one makes it the whole, a click on the first one all again.

    Raises:
        ValueError: an unknown measure.
    """
    title, value = _value(measure)
    root = _frames(profile.folded, value)
    body = "".join(_bars(name, frame, root.whole, title) for name, frame in root.below.items())
    kind = html.escape(profile.model.kind)
    head = f"{title} of {kind}: {number_to_string(root.whole)}".strip()
    page = _PAGE.replace("TITLE", head).replace("BODY", body or "<p>Nothing was counted.</p>")
    if path is not None:
        written(path, page)
    return page


def _frames(folded: Mapping[tuple[str, ...], Work], value: Callable[[Work], int]) -> _Frame:
    root = _Frame()
    for way, work in folded.items():
        amount, frame = value(work), root
        frame.whole += amount
        for name in way:
            frame = frame.below.setdefault(name, _Frame())
            frame.whole += amount
        frame.own += amount
    return root


def _bars(name: str, frame: _Frame, whole: int, title: str) -> str:
    if not frame.whole or frame.whole < whole * _THIN:
        return ""
    text = f"{name}: {number_to_string(frame.whole).strip()} {title}, {100 * frame.whole / whole:.3g} %"
    below = "".join(_bars(child, one, whole, title) for child, one in frame.below.items())
    rest = frame.whole - sum(one.whole for one in frame.below.values() if one.whole >= whole * _THIN)
    if below and rest:
        below += f'<i style="flex:{rest} 1 0"></i>'
    return (
        f'<div class="frame" data-whole="{frame.whole}"><b title="{html.escape(text)}">{html.escape(name)}</b>'
        f'<div class="row">{below}</div></div>'
    )


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title><style>
body { font: 13px sans-serif; margin: 1em; }
.row { display: flex; }
.frame { min-width: 0; overflow: hidden; }
.frame > b { display: block; font-weight: normal; white-space: nowrap; overflow: hidden; cursor: pointer;
  border: 1px solid #fff; padding: 2px 3px; background: #f4a259; }
.frame .frame > b { background: #f6bd60; } .frame .frame .frame > b { background: #f7d08a; }
.aside { display: none; }
</style></head><body><h1>TITLE</h1><div class="row" id="all">BODY</div><script>
const frames = [...document.querySelectorAll(".frame")];
for (const frame of frames) {
  frame.style.flex = frame.dataset.whole + " 1 0";
  frame.firstChild.onclick = () => {
    for (const one of frames) {
      const inLine = one.contains(frame) || frame.contains(one);
      one.classList.toggle("aside", !inLine);
    }
    for (const rest of document.querySelectorAll("i")) rest.classList.toggle("aside", !frame.contains(rest));
  };
}
</script></body></html>
"""
