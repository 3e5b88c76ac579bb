"""The tables of the page, as HTML. Everything that comes from a file is escaped where it is put in."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zoo.report.numbers import count, cut, in_bytes, number, numbers, span
from zoo.report.run import Run
from zoo.report.timeline import KINDS, TIMES, Timeline

__all__ = ["configuration", "environment", "forecast", "of_operations", "times"]

ROWS = 1_500
CHARACTERS = 200_000
"""Of a table: a page stays small whatever a file holds."""
_SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)


def esc(value: Any, most: int = 300) -> str:
    """Text for HTML."""
    return html.escape(cut(value, most))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Sequence[int] = (), cls: str = "") -> str:
    """Cells are HTML already."""
    mark = [' class="n"' if i in numeric else "" for i in range(len(heads))]
    head = "".join(f'<th scope="col"{m}>{h}</th>' for h, m in zip(heads, mark, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{m}>{cell}</td>" for cell, m in zip(row, mark, strict=True)) + "</tr>" for row in rows
    )
    return (
        f'<div class="card scroll"><table{cls}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )  # fmt: skip


# -- forecast beside measurement --------------------------------------------------------------------------------------


def forecast(run: Run) -> str:
    """What was said before the first step, beside what was measured; "" where neither is known."""
    rows = [_beside(*row) for row in _pairs(run)]
    if not rows:
        return ""
    heads = ("what", "forecast", "measured", "ratio", "")
    return table(heads, rows, numeric=(1, 2, 3))


def _pairs(run: Run) -> Iterator[tuple[str, float, float, Any]]:
    """(what, forecast, measured, how it is written)."""
    result, said = run.table("result"), run.table("forecast")
    for what, key in (("parameters and optimizer states", "kept_bytes"), ("sent in the last step", "wire_bytes")):
        there, here = numbers(result, f"forecast_{key}"), numbers(result, key)
        for rank, (planned, measured) in enumerate(zip(there, here, strict=False)):
            yield f"{what}, rank {rank}", planned, measured, in_bytes
            if rank == 15:
                break
    if not result and run.log is not None:  # it has not ended: of rank 0 what is known by now
        series = run.log.buckets.series
        kept = [number(said.get(key)) for key in ("parameters_bytes", "optimizer_bytes")]
        sent = said.get("wire_bytes")
        sizes = [number(v) for v in sent.values()] if isinstance(sent, dict) else []
        for what, key, parts in (
            ("parameters and optimizer states, rank 0", "state_bytes.0", kept),
            ("sent in a step, rank 0", "wire_bytes", sizes),
        ):
            known = [v for v in parts if v is not None]
            means = run.log.buckets.mean(key) if key in series else np.empty(0)
            if np.isfinite(means).any() and known and len(known) == len(parts):
                yield what, sum(known), _last(means), in_bytes
    time = said.get("time")
    step_s = number(time.get("step_s")) if isinstance(time, dict) else None
    if step_s is not None and run.log is not None and "step_s" in run.log.buckets.series:
        parts_of = run.log.buckets.series["step_s"]
        with np.errstate(over="ignore"):
            total = float(parts_of["total"].sum())
        known_steps = float(parts_of["count"].sum())
        if known_steps and math.isfinite(total):
            yield "time of a step", step_s, total / known_steps, span


def _last(values: Any) -> float:
    return float(values[values == values][-1])


def _beside(what: str, planned: float, measured: float, form: Any) -> tuple[str, ...]:
    most = max(planned, measured) or 1.0
    bars = "".join(
        f'<rect x="0" y="{y}" width="{100 * value / most:.1f}%" height="7" rx="2" class="f{colour}"></rect>'
        for y, value, colour in ((1, planned, 6), (10, measured, 0))
    )
    ratio = f"{measured / planned:.4g}" if planned else "–"
    same = ' aria-hidden="true"'
    return esc(what), esc(form(planned)), esc(form(measured)), ratio, f'<svg class="bar"{same}>{bars}</svg>'


def of_operations(run: Run) -> str:
    """What a step sends by operation, as it was forecast; "" where that is not known."""
    said = run.table("forecast").get("wire_bytes")
    sizes = {op: v for op, given in said.items() if (v := number(given))} if isinstance(said, dict) else {}
    if not sizes:
        return ""
    most, total = max(sizes.values()), sum(sizes.values())
    rows = [
        (
            esc(op, 60), esc(in_bytes(v)), f"{100 * v / total:.1f} %",
            f'<svg class="bar" aria-hidden="true"><rect x="0" y="3" width="{100 * v / most:.1f}%" height="11" rx="2" '
            'class="f1"></rect></svg>',
        )
        for op, v in sorted(sizes.items(), key=lambda item: -item[1])[:50]
    ]  # fmt: skip
    return table(("operation", "forecast, a step", "part", ""), rows, numeric=(1, 2))


# -- one step ---------------------------------------------------------------------------------------------------------


def times(found: Timeline) -> str:
    """What each rank spent the step on."""
    kinds = [kind for kind in TIMES if any(kind in one.by_kind for one in found.times)]
    heads = ("rank", *(KINDS[kind][0] for kind in kinds), "sum", "communication under way")
    rows = []
    for one in found.times:
        total = sum(one.by_kind.values())
        cells = [_part(one.by_kind.get(kind, 0.0), total) for kind in kinds]
        rows.append((str(one.rank), *cells, span(total), _part(one.under_way_s, total)))
    return table(heads, rows, numeric=range(1, len(heads)))


def _part(seconds: float, total: float) -> str:
    share = f' <span class="soft">{100 * seconds / total:.0f} %</span>' if total else ""
    return f"{span(seconds)}{share}"


# -- configuration and environment ------------------------------------------------------------------------------------


def configuration(run: Run) -> str:
    """Every value with its origin; those that are not defaults first seen, the others behind a button."""
    rows = [row for row in run.rows("origins") if isinstance(row, list) and len(row) == 3]
    if not rows and run.table("config"):
        rows = [[path, value, "not known"] for path, value in leaves(run.table("config"))]
    cells: list[str] = []
    size = left = 0
    for path, value, origin in rows:
        hidden = _SECRET.search(str(path).rpartition(".")[2]) and value not in ("None", None, "''", "")
        shown = esc("not told" if hidden else value)
        row = f"<td>{esc(path, 120)}</td><td>{shown}</td><td>{esc(origin, 120)}</td>"
        size += len(row)
        if len(cells) == ROWS or size > CHARACTERS:
            left = len(rows) - len(cells)
            break
        cells.append(f'<tr class="default">{row}</tr>' if origin == "default" else f"<tr>{row}</tr>")
    if not cells:
        return ""
    more = f"<p class='soft'>{count(left)} more values are in origins.json.</p>" if left else ""
    return (
        '<div class="tools"><label for="search">Find a key</label><input id="search" type="search" '
        'placeholder="such as stage"><button type="button" data-act="defaults" aria-pressed="false">show defaults'
        '</button></div><div class="card scroll"><table id="keys" class="keys hide"><thead><tr><th scope="col">key</th>'
        f'<th scope="col">value</th><th scope="col">from</th></tr></thead><tbody>{"".join(cells)}</tbody></table></div>'
        f"{more}"
    )


def environment(run: Run) -> str:
    """Versions and the machine; of an older run what its other files say."""
    found = dict(run.table("environment")) or {
        key: value for key, value in run.table("run").items() if key in ("torch", "python", "world_size")
    }
    rows, size = [], 0
    for path, value in leaves(found):
        value = in_bytes(value) if path.endswith("_bytes") and number(value) is not None else value
        rows.append((esc(path.replace("_", " ") if "." not in path else path, 120), esc(value)))
        size += sum(map(len, rows[-1]))
        if len(rows) == 300 or size > CHARACTERS:
            break
    return table(("what", "value"), rows, cls=' class="keys"') if rows else ""


def leaves(given: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted path → value."""
    for key, value in given.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value and depth < 20:
            yield from leaves(value, where, depth + 1)
        elif value is not None and value not in ([], {}):
            yield where, ", ".join(map(str, value)) if isinstance(value, list) else value
