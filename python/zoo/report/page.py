"""The report of a run: one file of HTML that asks for nothing from anywhere."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.report import tables
from zoo.report.charts import Chart, charts_of, series_of
from zoo.report.numbers import count, cut, in_bytes, number, numbers, span
from zoo.report.run import Run, read_run
from zoo.report.timeline import KINDS, Timeline, timeline_of

__all__ = ["page_of", "write_report"]

LARGEST = 1_000_000
"""Bytes of a page: curves get fewer points where it would be larger."""
_AFTER_THREE = "A run of <code>zoo train</code> writes it after its third step: run it again."
_AGAIN = "A run of <code>zoo train</code> of this version writes it: run it again, or resume it for some steps."


def write_report(folder: str | Path, out: str | Path | None = None, *, processes: int | None = None) -> Path:
    """The page of a run, as a file; where it is.

    Reads what the run has left (``log.jsonl`` or ``records.jsonl``, and JSON files beside it), and runs nothing of it.

    Args:
        folder: of a run. out: the file; ``report.html`` in the folder by default. It is replaced as a whole.
        processes: that read a long log; by default as many as there are cores.

    Raises:
        ValueError: there is no run in the folder.
        OSError: a file cannot be read or written.
    """
    run = read_run(Path(folder), processes=processes)
    path = Path(out) if out is not None else Path(folder) / "report.html"
    if path.is_dir():
        example = str(path / "report.html")
        raise ValueError(f"{str(path)!r} is a directory; name a file for the page, such as {example!r}.")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")
    try:
        with open(handle, "w", encoding="utf-8", errors="replace") as file:  # names of files may be no text
            file.write(page_of(run))
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return path


def _umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def page_of(run: Run) -> str:
    """The page, at most 1 MB."""
    charts, timeline = charts_of(run), timeline_of(run.files.get("timeline"))
    while True:
        text = _page(run, charts, timeline)
        if len(text.encode(errors="replace")) <= LARGEST or run.log is None or run.log.buckets.size <= 60:
            return text
        run.log.buckets.double()


def _page(run: Run, charts: list[Chart], timeline: Timeline | None) -> str:
    style, script = _text("page.css"), _text("page.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = list(_sections(run, charts, timeline))
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name, _ in parts)
    body = "".join(f'<section id="{key}"><h2>{name}</h2>{inner}</section>' for key, name, inner in parts)
    name = html.escape(cut(run.name, 120))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{name} · zoo report</title><style>{style}</style></head><body>"
        f"<header><h1>{name}</h1><p class='lead'>{_lead(run)}</p>{_tiles(run)}<nav aria-label='Parts'>{links}</nav>"
        f"</header><main>{_notes(run)}{body}</main><footer>{_footer(run)}</footer>"
        f'<script type="application/json" id="data">{_json(_data(run, charts, timeline))}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: Any) -> str:
    """For within a script element: no character of it ends one."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(run: Run, charts: list[Chart], timeline: Timeline | None) -> dict[str, Any]:
    buckets = run.log.buckets if run.log is not None else None
    return {
        "width": buckets.width if buckets else 1, "count": buckets.size if buckets else 0,
        "last": buckets.last if buckets else 0, "series": series_of(buckets, charts) if buckets else {},
        "charts": {chart.name: chart.to_dict() for chart in charts},
        "timeline": timeline.data if timeline is not None else None,
    }  # fmt: skip


# -- what stands above the pictures -----------------------------------------------------------------------------------


def _lead(run: Run) -> str:
    result, config, environment = run.table("result"), run.table("config"), run.table("environment")
    train = config.get("train")
    task = train.get("task") if isinstance(train, dict) else None
    ranks = number({"world_size": environment.get("ranks"), **run.table("run"), **result}.get("world_size"))
    zero = config.get("zero_optimization")
    stage = number({**(zero if isinstance(zero, dict) else {}), **result}.get("stage"))
    versions = {name: environment.get(name) for name in ("zoo", "torch")}
    parts = [
        f"task {cut(task['type'], 60)}" if isinstance(task, dict) and isinstance(task.get("type"), str) else "",
        f"ZeRO stage {stage:.0f}" if stage is not None else "",
        f"{ranks:.0f} rank{'s' if ranks > 1 else ''}" if ranks else "",
        *(f"{name} {cut(found, 40)}" for name, found in versions.items() if isinstance(found, str)),
    ]
    return html.escape(" · ".join(part for part in parts if part)) or "report of a run"


def _tiles(run: Run) -> str:
    tiles = [(name, value, more) for name, value, more in _figures(run) if value]
    inner = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}<small>{html.escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{inner}</dl>' if tiles else ""


def _figures(run: Run) -> Iterator[tuple[str, str, str]]:
    """(name, value, what stands below it)."""
    result, log = run.table("result"), run.log
    series = log.buckets.series if log is not None else {}
    loss, unit = number(result.get("validation_loss")), cut(result.get("unit", "unit"), 20)
    if loss is not None:
        baseline = number(result.get("baseline_loss"))
        beside = f"{cut(result.get('baseline') or 'baseline', 30)} {baseline:.4f}" if baseline is not None else ""
        yield "validation loss", f"{loss:.4f}", beside or f"nats per {unit}"
    elif log is not None and "loss" in series:
        means = log.buckets.mean("loss")
        yield "training loss, at the end", f"{tables._last(means):.4f}" if (means == means).any() else "", ""
    if log is not None and log.buckets.last:
        skipped = f"{count(log.skipped_steps)} skipped" if log.skipped_steps else "none skipped"
        yield "steps", count(log.buckets.last), skipped
    pace = number(result.get("tokens_per_s"))
    tokens = number(result.get("total_tokens"))
    if pace is not None:
        yield "tokens/s", count(pace), f"{count(tokens)} tokens in all" if tokens is not None else ""
    seconds = number(result.get("total_s"))
    if seconds is None and "elapsed_s" in series:
        seconds = float(series["elapsed_s"]["high"][series["elapsed_s"]["count"] > 0].max(initial=0.0))
    if seconds:
        trained = number(result.get("train_s"))
        yield "time", span(seconds), f"{span(trained)} of it in steps" if trained else ""
    parameters = number(result.get("num_parameters"))
    if parameters is not None:
        yield "parameters", count(parameters), ""
    peaks = numbers(result, "peak_resident_bytes")
    if peaks:
        yield "peak memory", in_bytes(max(peaks)), "resident, of one rank"
    if "wire_bytes" in series:
        yield "sent by rank 0", in_bytes(float(series["wire_bytes"]["total"].sum())), "in all steps"


def _notes(run: Run) -> str:
    """What a reader must know before the pictures."""
    found, log = [], run.log
    if log is None:
        found.append("There is no log of steps: neither log.jsonl nor records.jsonl is there, so there are no curves.")
    else:
        if not run.table("result"):
            found.append("The run has not ended: there is no result.json. The page shows what there is by now.")
        if log.cut:
            found.append("The last line of the log is not complete and was left out.")
        if log.broken:
            found.append(f"{count(log.broken)} lines of the log are no records and were left out.")
        bad = {name: number for name, number in log.buckets.not_finite.items() if number}
        if bad:
            which = ", ".join(f"{cut(name, 40)} ({count(number)})" for name, number in sorted(bad.items()))
            found.append(f"Values that are infinite are in no curve: {which}.")
        if log.names_left_out:
            found.append("The log has more names than are drawn; the first ones are.")
    return "".join(f'<p class="note">{html.escape(text)}</p>' for text in found)


# -- the parts --------------------------------------------------------------------------------------------------------


def _sections(run: Run, charts: list[Chart], timeline: Timeline | None) -> Iterator[tuple[str, str, str]]:
    """(anchor, title, HTML) of each part; where something is missing, what, and how to get it."""
    names = {"training": "Training", "memory": "Memory", "communication": "Communication"}
    for key, title in names.items():
        inner = _figures_of(run, charts, key)
        if key == "communication":
            inner += _communication(run)
        yield key, title, inner or _missing(run, f"The log has no numbers of {title.lower()}.", _AGAIN)
    yield "step", "One step", _step(run, timeline)
    beside = tables.forecast(run)
    about = "<p class='soft'>Grey: forecast, from the plan of a step before it ran; blue: measured.</p>"
    inner = about + beside if beside else _missing(run, _why(run, "forecast"), _AGAIN)
    yield "forecast", "Forecast and measurement", inner
    keys = tables.configuration(run)
    yield "configuration", "Configuration", keys or _missing(run, _why(run, "origins"), _AGAIN)
    others = _figures_of(run, charts, "other")
    if others:
        yield "other", "Other numbers", others
    machine = tables.environment(run)
    yield "environment", "Environment", machine or _missing(run, _why(run, "environment"), _AGAIN)


def _why(run: Run, key: str) -> str:
    return f"{run.problems[key]}." if key in run.problems else f"{key}.json says nothing that can be shown."


def _missing(run: Run, what: str, how: str) -> str:
    return f'<p class="note">{html.escape(what)} {how}</p>'


def _figures_of(run: Run, charts: list[Chart], section: str) -> str:
    inner = "".join(_figure(chart) for chart in charts if chart.section == section)
    if not inner or run.log is None:
        return ""
    width = run.log.buckets.width
    about = ""
    if width > 1 and section == "training":
        about = (
            f"<p class='soft'>Each point stands for {count(width)} steps: the line is their mean, and the pale band "
            "goes from their smallest to their largest value, so that no spike is lost.</p>"
        )
    return f'{about}<div class="charts">{inner}</div>'


def _figure(chart: Chart) -> str:
    items = [(_mark(curve.colour, dashed=False), curve.name) for curve in chart.curves]
    items += [(_mark(one.colour, dashed=True), f"{one.name} {_level(chart, one.value)}") for one in chart.levels]
    legend = "".join(f"<li>{mark}{html.escape(name)}</li>" for mark, name in items)
    button = '<button type="button" data-act="log" aria-pressed="false">log scale</button>' if chart.log else ""
    return (
        f'<figure data-chart="{html.escape(chart.name)}"{" class=wide" if chart.wide else ""}>'
        f"<figcaption><h3>{html.escape(chart.title)}</h3><span class='unit'>{html.escape(chart.unit)}</span>{button}"
        f'</figcaption><ul class="legend">{legend}</ul>'
        f'<div class="plot" tabindex="0" role="group" aria-label="{html.escape(chart.title)} over steps; '
        'arrow keys read values"></div><p class="read" aria-live="polite"></p></figure>'
    )


def _level(chart: Chart, value: float) -> str:
    return in_bytes(value) if chart.form == "bytes" else f"{value:.4g}"


def _mark(colour: int, *, dashed: bool) -> str:
    cls = f'class="{"level" if dashed else "mean"} s{colour}"'
    return f'<svg width="22" height="8" aria-hidden="true"><line x1="0" x2="22" y1="4" y2="4" {cls}></line></svg>'


def _communication(run: Run) -> str:
    found = tables.of_operations(run)
    return f"<h3>By operation</h3>{found}" if found else ""


def _step(run: Run, timeline: Timeline | None) -> str:
    if timeline is None:
        return _missing(run, _why(run, "timeline"), _AFTER_THREE)
    legend = "".join(
        f'<li><svg width="14" height="14" aria-hidden="true"><rect width="14" height="14" rx="3" class="{_fill(kind)}">'
        f"</rect></svg>{html.escape(KINDS[kind][0])}</li>"
        for kind in timeline.kinds
    )
    words = [f"Step {timeline.step}, {span(timeline.end_s)}."]
    words.append("A wait is time in which a rank computes nothing because communication is not there yet.")
    if timeline.on_device:
        words.append("Times are those of the host: a device does later what the host has started.")
    if timeline.ranks_of_job > len(timeline.times):
        words.append(f"The first {len(timeline.times)} of {timeline.ranks_of_job} ranks are shown.")
    if timeline.left_out:
        words.append(f"{count(timeline.left_out)} of the shortest spans are left out.")
    buttons = "".join(
        f'<button type="button" data-act="{act}">{name}</button>'
        for act, name in (("in", "closer"), ("out", "wider"), ("whole", "whole step"))
    )
    return (
        f"<p class='soft'>{html.escape(' '.join(words))}</p>"
        f'<figure class="wide" id="timeline-figure"><div class="tools">{buttons}<span class="soft">or drag over a part'
        f'</span></div><ul class="legend">{legend}</ul><div class="plot"></div><p class="read" aria-live="polite"></p>'
        f"</figure><h3>What the ranks spent it on</h3>{tables.times(timeline)}"
    )


def _fill(kind: str) -> str:
    return "waits" if kind == "wait" else f"f{KINDS[kind][1]}"


def _footer(run: Run) -> str:
    words = [f"Made by zoo report from {run.log_name or 'the files of the run'}."]
    if run.log is not None:
        size, width = run.log.buckets.size, run.log.buckets.width
        words.append(f"{count(run.log.buckets.num_steps)} records in {count(size)} buckets of {count(width)}.")
    words.append("The page needs no network, and what it shows is in it.")
    return html.escape(" ".join(words))
