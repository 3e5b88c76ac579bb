"""What a search leaves: a table, JSON, a picture, and the best configuration."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from zoo.config.document import Document
from zoo.cost.writing import write_whole
from zoo.tuning.needs import settings, with_settings
from zoo.tuning.search import Found, Trial

__all__ = ["draw", "summary", "table", "write", "write_best"]

SHOWN = 12


def ranked(found: Found) -> list[Trial]:
    """Trials, the fastest first, then those that were not measured."""
    return sorted(
        found.trials, key=lambda t: (t.outcome.step_s is None, t.outcome.step_s or 0.0, t.number)
    )  # fmt: skip


def table(found: Found, *, shown: int = SHOWN) -> str:
    """The trials by their speed, forecast beside measured; what was forecast only; why others cannot run."""
    rows = [f"{'rank':>4}  {'measured':>10}  {'forecast':>10}  {'resident':>10}  candidate"]
    for place, trial in enumerate(ranked(found), 1):
        fitted = found.predictions.get(trial.candidate)
        measured = f"{trial.outcome.step_s:.4f} s" if trial.outcome.step_s is not None else trial.outcome.status
        forecast = f"{fitted.seconds:.4f} s" if fitted is not None else "-"
        resident = f"{sum(trial.outcome.peak_bytes) / 2**20:,.0f} MiB" if trial.outcome.peak_bytes else "-"
        why = f": {trial.outcome.why}" if trial.outcome.why else ""
        rows.append(f"{place:>4}  {measured:>10}  {forecast:>10}  {resident:>10}  {trial.candidate.label()}{why}")
    done = {trial.candidate for trial in found.trials}
    others = sorted((p.seconds, c.label()) for c, p in found.predictions.items() if c not in done)
    rows += [f"{'':>4}  {'':>10}  {seconds:>8.4f} s  {'':>10}  {label}" for seconds, label in others[:shown]]
    if len(others) > shown:
        rows.append(f"      and {len(others) - shown} more that were forecast only")
    for why, count in Counter(found.rejected.values()).most_common(shown):
        rows.append(f"      {count} rejected: {why}")
    return "\n".join(rows)


def summary(found: Found) -> dict[str, Any]:
    """Everything, for JSON."""
    best = found.best
    return {
        "best": best.candidate.to_dict() if best else None,
        "best_step_s": best.outcome.step_s if best else None,
        "stopped": found.stopped,
        "candidates": len(found.needs),
        "rejected": len(found.rejected),
        "judged_without_a_run": found.judged_without_a_run,
        "trials": [
            {
                "number": t.number, "candidate": t.candidate.to_dict(), "forecast_s": t.forecast_s,
                "fitted_s": found.predictions[t.candidate].seconds if t.candidate in found.predictions else None,
                **t.outcome.to_dict(),
            }
            for t in ranked(found)
        ],
        "not_run": [
            {
                "candidate": c.to_dict(), "least_bytes": need.job_bytes, "rejected": found.rejected.get(c),
                "forecast_s": found.predictions[c].seconds if c in found.predictions else None,
            }
            for c, need in found.needs.items() if c not in {t.candidate for t in found.trials}
        ],
    }  # fmt: skip


def write_best(found: Found, document: Document, path: Path) -> bool:
    """The configuration of the fastest trial, as ``zoo train`` takes it; whether there is one."""
    if found.best is None:
        return False
    values = with_settings(document, settings(found.best.candidate, found.job)).values
    text = json.dumps({key: value for key, value in values.items() if key != "autotuning"}, indent=1)
    write_whole(path, text + "\n")
    return True


def write(found: Found, document: Document, folder: Path) -> None:
    """``report.json``, ``best.json`` and ``forecast.png`` where something was measured."""
    write_whole(folder / "report.json", json.dumps(summary(found), indent=1) + "\n")
    if write_best(found, document, folder / "best.json"):
        draw(found, folder / "forecast.png")


def draw(found: Found, path: Path) -> None:
    """Measured against forecast: as it was before each trial, and as the model says now; a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    trials = [t for t in found.trials if t.outcome.step_s is not None]
    measured = [t.outcome.step_s or 0.0 for t in trials]
    before = [t.forecast_s if t.forecast_s is not None else float("nan") for t in trials]
    now = [found.predictions[t.candidate].seconds for t in trials]
    axes.scatter(before, measured, marker="x", color="#c0392b", label="forecast before the trial")
    axes.scatter(now, measured, s=22, color="#1f4e8c", label="model at the end")
    top = 1.1 * max(value for value in (*before, *now, *measured) if value == value)
    axes.plot([0, top], [0, top], color="#444444", linestyle="--", linewidth=1, label="equal")
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_xlabel("forecast seconds of a step")
    axes.set_ylabel("measured seconds of a step")
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path)
