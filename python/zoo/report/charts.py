"""Which curves a log has, and how they are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zoo.report.numbers import cut, number, numbers, rounded
from zoo.report.reading import RANKS
from zoo.report.run import Run
from zoo.report.series import Buckets

__all__ = ["Chart", "charts_of", "series_of"]

MOST_OTHERS = 16
"""Charts of what parts and users report."""
TIME = "elapsed_s"


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        key: of the series. colour: of the palette. band: smallest and largest values are filled.
        sparse: measured now and then, and holds until the next time.
    """

    key: str
    name: str
    colour: int
    band: bool = True
    sparse: bool = False


@dataclass(frozen=True)
class Level:
    """A dashed line at one value."""

    name: str
    value: float
    colour: int


@dataclass(frozen=True)
class Chart:
    """A picture over steps.

    Attributes:
        form: how its numbers are written: "plain", "large", "bytes" or "seconds". zero: its axis begins there.
        section: where it stands. wide: over the whole page. log: it may be shown logarithmically.
    """

    name: str
    title: str
    unit: str
    section: str
    curves: tuple[Curve, ...]
    levels: tuple[Level, ...] = ()
    form: str = "plain"
    zero: bool = False
    wide: bool = False
    log: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For the script."""
        return {
            "title": self.title, "form": self.form, "zero": self.zero,
            "curves": [vars(curve) for curve in self.curves],
            "levels": [{"name": v.name, "value": rounded(v.value, 7), "colour": v.colour} for v in self.levels],
        }  # fmt: skip


@dataclass
class _Found:
    """Charts, and which series they show."""

    there: Mapping[str, Any]
    charts: list[Chart] = field(default_factory=list)
    shown: set[str] = field(default_factory=set)

    def add(self, name: str, title: str, unit: str, section: str, curves: list[Curve], **options: Any) -> None:
        """A chart, if there is something to draw."""
        here = tuple(curve for curve in curves if curve.key in self.there)
        self.shown |= {curve.key for curve in here}
        if here:
            self.charts.append(Chart(name, title, unit, section, here, **options))


def charts_of(run: Run) -> list[Chart]:
    """Those for which there are numbers, in the order of the page."""
    if run.log is None:
        return []
    found = _Found(run.log.buckets.series, shown={TIME})
    result, said = run.table("result"), run.table("forecast")
    unit = cut(result.get("unit", ""), 20)
    baseline = number(result.get("baseline_loss"))
    levels = () if baseline is None else (Level(cut(result.get("baseline") or "baseline", 40), baseline, 6),)
    found.add(
        "loss", "Loss", f"nats per {unit}" if unit else "", "training",
        [Curve("loss", "training", 0), Curve("validation_loss", "validation", 1, band=False, sparse=True)],
        levels=levels, wide=True, log=True,
    )  # fmt: skip
    found.add("lr", "Learning rate", "of the first group", "training", [Curve("lr", "learning rate", 3)], zero=True)
    norm = [Curve("grad_norm", "norm", 2)]
    found.add("grad_norm", "Gradient norm", "before clipping", "training", norm, log=True, zero=True)
    pace = [Curve("tokens_per_s", "throughput", 0)]
    found.add("tokens_per_s", "Throughput", "tokens/s, all ranks", "training", pace, form="large", zero=True)
    took = [Curve("step_s", "a step", 4)]
    found.add("step_s", "Time of a step", "rank 0", "training", took, form="seconds", zero=True, log=True)
    _memory(found, result, said)
    planned = _total(said.get("wire_bytes"))
    levels = () if planned is None else (Level("forecast", planned, 6),)
    found.add(
        "wire_bytes", "Sent in a step", "rank 0", "communication", [Curve("wire_bytes", "measured", 1)],
        levels=levels, form="bytes", zero=True, wide=True,
    )  # fmt: skip
    others = [name for name in found.there if name not in found.shown]
    for name in sorted(others)[:MOST_OTHERS]:
        form = "seconds" if name.endswith("_s") else "bytes" if name.endswith("_bytes") else "plain"
        found.add(f"other {name}", cut(name, 60), "", "other", [Curve(name, cut(name, 60), 0)], form=form)
    return found.charts


def _memory(found: _Found, result: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    ranks = range(RANKS)
    resident = [Curve(f"rss_bytes.{r}", f"rank {r}", r, band=False, sparse=True) for r in ranks]
    found.add("rss_bytes", "Resident memory", "of the process", "memory", resident, form="bytes", zero=True)
    kept = numbers(result, "forecast_kept_bytes")[:1] or [
        sum(v for key in ("parameters_bytes", "optimizer_bytes") if (v := number(said.get(key))) is not None)
    ]
    levels = (Level("forecast, rank 0", kept[0], 6),) if kept[0] else ()
    states = [Curve(f"state_bytes.{r}", f"rank {r}", r, band=False, sparse=True) for r in ranks]
    states.append(Curve("memory_bytes", "rank 0", 0, band=False, sparse=True))
    found.add(
        "state_bytes", "Model states", "parameters and optimizer states, after a step", "memory", states,
        levels=levels, form="bytes", zero=True,
    )  # fmt: skip


def _total(sizes: Any) -> float | None:
    values = [number(v) for v in sizes.values()] if isinstance(sizes, dict) else []
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None


def series_of(buckets: Buckets, charts: list[Chart]) -> dict[str, dict[str, list[float | int | None]]]:
    """By name "low", "mean" and "high" of each bucket, None where nothing is known; the mean alone where they are the
    same. Only what a chart shows."""
    wanted = {curve.key for chart in charts for curve in chart.curves} | {TIME} & buckets.series.keys()
    found = {}
    for name in sorted(wanted):
        mean, parts = buckets.mean(name), buckets.series[name]
        low, high = parts["low"][: buckets.size], parts["high"][: buckets.size]
        found[name] = {"mean": _plain(mean)}
        if name == TIME:
            found[name] = {"mean": _plain(high)}
        elif not np.array_equal(low, high, equal_nan=True):
            found[name] |= {"low": _plain(low), "high": _plain(high)}
    return found


def _plain(values: Any) -> list[float | int | None]:
    return [rounded(float(v)) if np.isfinite(v) else None for v in values]
