"""From raw rounds to rates, ratios and the verdict on each target. A ratio is taken within its round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.common import Spread

Raw = dict[str, Any]
Round = dict[str, dict[str, Any]]
FIO = "fio-"
HUGE = "-huge"


@dataclass(frozen=True)
class Target:
    """``value >= limit`` (or ``<=`` where ``at_most``) as a sentence; ``value`` is None where it was not measured."""

    text: str
    value: float | None
    limit: float
    at_most: bool = False
    unit: str = ""

    @property
    def verdict(self) -> str:
        """Whether it is "met", "missed by …" or "not measured", on the medians; close ones are within the noise."""
        if self.value is None:
            return "not measured"
        shown = f"{self.value:.3f}{self.unit} against {self.limit:.3f}{self.unit}"
        if self.value <= self.limit if self.at_most else self.value >= self.limit:
            return f"met ({shown})"
        return f"**missed by {100 * abs(self.value / self.limit - 1):.1f} %** ({shown})"


def rate(figures: dict[str, Any]) -> float:
    """Bytes a second."""
    return float(figures["num_bytes"] / figures["wall_s"])


def fio_best(figures: Round, *, huge: bool = True) -> float | None:
    """The highest rate of fio's engines in this round, without ``huge`` of those in ordinary pages."""
    fio = {name: f for name, f in figures.items() if name.startswith(FIO) and (huge or not name.endswith(HUGE))}
    return max((rate(f) for f in fio.values()), default=None)


def rates(rounds: list[Round], name: str) -> Spread | None:
    """GB (10^9 bytes) a second."""
    return _spread([rate(r[name]) / 1e9 for r in rounds if name in r])


def cpu_per_gb(rounds: list[Round], name: str) -> Spread | None:
    """CPU seconds a GB."""
    return _spread([r[name]["cpu_s"] / (r[name]["num_bytes"] / 1e9) for r in rounds if name in r])


def cached(rounds: list[Round], name: str) -> Spread | None:
    """The share of the file in the page cache afterwards; fio is not looked at."""
    return _spread([r[name]["cached"] for r in rounds if "cached" in r.get(name, {})])


def to_fio(rounds: list[Round], name: str, *, huge: bool = True) -> Spread | None:
    """The rate over that of `fio_best` in the same round."""
    both = [(rate(r[name]), fio_best(r, huge=huge)) for r in rounds if name in r]
    return _spread([mine / best for mine, best in both if best is not None])


def gil(raw: Raw, key: str, what: str) -> Spread | None:
    """``what`` is "ratios", "running" or "bytes_per_s" of GIL figures, over all windows of all rounds."""
    return _spread([value for r in raw["gil"] if key in r for value in r[key][what]])


def _spread(values: list[float]) -> Spread | None:
    return Spread(tuple(values)) if values else None


def _median(found: Spread | None) -> float | None:
    return found.median if found is not None else None


def op_targets(raw: Raw, op: str) -> list[Target]:
    """What the engine is asked for in "write" and "read"; a new file has none."""
    if op == "new":
        return []
    rounds, targets = raw["rounds"][op], []
    for name, memory in (("zoo-pool", "a pool buffer"), ("zoo", "an ordinary tensor")):
        text = f"{op}, from {memory}" if op == "write" else f"{op}, into {memory}"
        targets.append(Target(f"{text}: at least 0.95 of fio's best engine", _median(to_fio(rounds, name)), 0.95))
        spent = _median(cpu_per_gb(rounds, name))
        targets.append(Target(f"{text}: at most 0.05 CPU-seconds a GB", spent, 0.05, True, " s"))
    return targets


def gil_targets(raw: Raw) -> list[Target]:
    """A counter beside zoo loses less than 5 %."""
    return [
        Target(f"{direction}, {memory}: the counter keeps 0.95 of its rate", _median(gil(raw, key, "ratios")), 0.95)
        for direction in ("write", "read")
        for name, memory in (("zoo-pool", "pool buffer"), ("zoo", "ordinary tensor"))
        for key in (f"{name} {direction}",)
    ]
