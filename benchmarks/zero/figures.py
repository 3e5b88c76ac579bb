"""From raw rounds to medians, ratios and the verdict on each target. A ratio is taken within its round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Spread
from benchmarks.zero.contenders import CONTENDERS

Raw = dict[str, Any]
OverRanks = Callable[[Sequence[dict[str, Any]], str], float]


@dataclass(frozen=True)
class Target:
    """``value <= limit`` as a sentence; ``value`` is None where it was not measured."""

    text: str
    value: float | None
    limit: float
    unit: str = ""

    @property
    def verdict(self) -> str:
        """Whether it is "met", "missed by …" or "not measured", on the medians; close ones are within the noise."""
        if self.value is None:
            return "not measured"
        shown = f"{self.value:.4g}{self.unit} against {self.limit:.4g}{self.unit}"
        if self.value <= self.limit:
            return f"met ({shown})"
        if self.limit <= 0:
            return f"**missed** ({shown})"
        return f"**missed by {100 * (self.value / self.limit - 1):.1f} %** ({shown})"


def mean_over_ranks(ranks: Sequence[dict[str, Any]], key: str) -> float:
    """The mean rank's figure."""
    return statistics.fmean(r[key] for r in ranks)


def max_over_ranks(ranks: Sequence[dict[str, Any]], key: str) -> float:
    """The largest rank's figure."""
    return max(r[key] for r in ranks)


def spread(raw: Raw, section: str, name: str, key: str, over: OverRanks = mean_over_ranks) -> Spread | None:
    """A contender's figure, round by round."""
    values = [over(r[section][name], key) for r in raw["rounds"] if name in r.get(section, {})]
    return Spread(tuple(values)) if values else None


def ratio(raw: Raw, section: str, name: str, to: str, key: str) -> Spread | None:
    """A contender's figure over another's of the same round."""
    both = [r[section] for r in raw["rounds"] if name in r.get(section, {}) and to in r.get(section, {})]
    if not both:
        return None
    return Spread(tuple(mean_over_ranks(r[name], key) / mean_over_ranks(r[to], key) for r in both))


def loss_difference(raw: Raw, section: str, name: str) -> float | None:
    """The largest ``|a - b| / max(1, |b|)`` of a loss and DDP's: same rank, step and round."""
    worst: float | None = None
    for r in raw["rounds"]:
        if name not in r.get(section, {}) or "ddp" not in r.get(section, {}):
            continue
        for mine, reference in zip(r[section][name], r[section]["ddp"], strict=True):
            for a, b in zip(mine["losses"], reference["losses"], strict=False):
                worst = max(worst or 0.0, abs(a - b) / max(1.0, abs(b)))
    return worst


def whole_sections(raw: Raw) -> Raw:
    """Without the sections of a round in which contenders are missing that other rounds have: a run that was ended."""
    most: dict[str, int] = {}
    for r in raw["rounds"]:
        for section, figures in r.items():
            most[section] = max(most.get(section, 0), len(figures))
    rounds = [{s: figures for s, figures in r.items() if len(figures) == most[s]} for r in raw["rounds"]]
    return {**raw, "rounds": rounds}


def num_rounds(raw: Raw, section: str) -> int:
    """Rounds that have this section."""
    return sum(section in r for r in raw["rounds"])


def median(found: Spread | None) -> float | None:
    """The median, where there is one."""
    return found.median if found is not None else None


def host_targets(raw: Raw) -> list[Target]:
    """Section 1."""
    zoo = spread(raw, "host", "zoo", "cpu_s")
    peers = [median(ratio(raw, "host", "zoo", name, "cpu_s")) for name in ("fsdp2", "deepspeed")]
    closest = max((p for p in peers if p is not None), default=None)
    return [
        Target("zoo gathers and releases a unit in at most 40 µs of host time", zoo and zoo.median * 1e6, 40, " µs"),
        Target("zoo takes at most 1/7 of the best peer's", closest, 1 / 7),
    ]


def step_targets(raw: Raw) -> list[Target]:
    """Section 2. All are ratios of CPU time a step."""

    def cpu(section: str, name: str, to: str) -> float | None:
        return median(ratio(raw, section, name, to, "cpu_s"))

    targets = [
        Target("tiny modules, world 2: zoo stage 3 at most 1/3 of DeepSpeed's", cpu("tiny2", "zoo3", "ds3"), 1 / 3),
        Target("tiny modules, world 2: zoo stage 3 at most 1.6x unsharded", cpu("tiny2", "zoo3", "plain"), 1.6),
        Target("GPT, world 2: zoo stage 1 at most DDP", cpu("gpt2", "zoo1", "ddp"), 1.0),
        Target("GPT, world 2: zoo stage 2 at most DDP", cpu("gpt2", "zoo2", "ddp"), 1.0),
        Target("GPT, world 2: zoo stage 3 at most 1.6x unsharded", cpu("gpt2", "zoo3", "plain"), 1.6),
    ]
    for section, title in (("tiny2", "tiny modules"), ("gpt2", "GPT")):
        differences = [loss_difference(raw, section, f"zoo{s}") for s in range(4)]
        known = [d for d in differences if d is not None]
        worst = max(known, default=None)
        targets.append(Target(f"{title}, world 2: losses of all zoo stages equal DDP's", worst, 1e-6))
    return targets


def growth(raw: Raw, name: str) -> Spread | None:
    """Growth of the resident set of the larger rank: GPT, world 2."""
    return spread(raw, "gpt2", name, "rss_growth_bytes", max_over_ranks)


def rss_targets(raw: Raw) -> list[Target]:
    """Section 3."""
    targets = []
    for stage in range(4):
        zoo = median(growth(raw, f"zoo{stage}"))
        for name, contender in CONTENDERS.items():
            theirs = median(growth(raw, name))
            if contender.peer and contender.stage == stage and theirs is not None:
                text = f"stage {stage}: zoo grows by less than {contender.label}"
                targets.append(Target(text, zoo and zoo / 1e6, theirs / 1e6, " MB"))
    return targets


def states_targets(raw: Raw) -> list[Target]:
    """Section 4."""
    targets = []
    for stage in range(4):
        excess = None
        for r in raw["rounds"]:
            for rank in r.get("states", {}).get(f"zoo{stage}", []):
                excess = max(excess or 0.0, abs(rank["peak"]["total"] / rank["formula_bytes"] - 1) * 100)
        targets.append(Target(f"stage {stage}: peak of the model states within 5 % of the formula", excess, 5, " %"))
    return targets
