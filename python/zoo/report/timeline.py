"""One step in time, as a run has written it: spans for the picture, and what each rank spent its time on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from zoo.report.numbers import cut, number

__all__ = ["RankTime", "Timeline", "timeline_of"]

SPANS = 4_000
"""Of all ranks together: the shortest of more are left out."""
KINDS = {
    "forward": ("forward", 0), "backward": ("backward", 2), "update": ("update", 3), "wait": ("wait", 5),
    "batch": ("batch", 8), "loss": ("loss", 8), "transfers": ("transfers between stages", 8), "outside": ("other", 8),
    "gather": ("gather", 1), "reduce": ("reduction", 4), "publish": ("publication", 6),
}  # fmt: skip
"""Of spans: what they are called, and their colour."""
TIMES = ("forward", "backward", "update", "batch", "loss", "transfers", "wait")
_LANES = ("compute", "communication")


@dataclass(frozen=True)
class RankTime:
    """Seconds of one rank: by kind what it computed; and how long something was under way."""

    rank: int
    by_kind: dict[str, float]
    under_way_s: float


@dataclass
class Timeline:
    """A step.

    Attributes:
        step: its number. end_s: when the last span ended. on_device: the host's clock does not say when things ran.
        data: for the script. times: of each rank. left_out: spans that are not shown. ranks_of_job: how many there
        were.
    """

    step: int = 0
    end_s: float = 0.0
    on_device: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    times: list[RankTime] = field(default_factory=list)
    left_out: int = 0
    ranks_of_job: int = 0
    kinds: list[str] = field(default_factory=list)


def timeline_of(given: Any) -> Timeline | None:
    """None where there is nothing to draw. What has not the form of a span is left out."""
    if not isinstance(given, dict) or not isinstance(given.get("ranks"), list):
        return None
    found = Timeline(step=int(number(given.get("step")) or 0), on_device=given.get("device") != "cpu")
    found.ranks_of_job = int(number(given.get("ranks_of_job")) or 0)
    ranks: list[tuple[int, list[Any]]] = []
    for one in given["ranks"]:
        if isinstance(one, dict) and isinstance(one.get("spans"), list):
            spans = [span for span in map(_checked, one["spans"]) if span is not None]
            found.left_out += int(number(one.get("left_out")) or 0) + len(one["spans"]) - len(spans)
            if spans:
                ranks.append((int(number(one.get("rank")) or 0), spans))
    if not ranks:
        return None
    found.end_s = max(span[3] + span[4] for _, spans in ranks for span in spans)
    found.times = [_time_of(rank, spans) for rank, spans in ranks]
    total = sum(len(spans) for _, spans in ranks)
    if total > SPANS:
        lengths = sorted((span[4] for _, spans in ranks for span in spans), reverse=True)
        ranks = [(rank, [span for span in spans if span[4] > lengths[SPANS]]) for rank, spans in ranks]
        found.left_out += total - sum(len(spans) for _, spans in ranks)
    found.kinds = list(dict.fromkeys(span[1] for _, spans in ranks for span in spans))
    found.data = _for_script(found, ranks)
    return found


def _checked(span: Any) -> tuple[str, str, str, float, float, float] | None:
    """(lane, kind, name, start, length, bytes)."""
    if not isinstance(span, list) or len(span) != 6 or not all(isinstance(v, str) for v in span[:3]):
        return None
    start, end, size = map(number, span[3:])
    if span[0] not in _LANES or span[1] not in KINDS or start is None or end is None or size is None:
        return None
    return (span[0], span[1], cut(span[2], 80), start, end - start, size) if 0 <= start <= end else None


def _time_of(rank: int, spans: list[Any]) -> RankTime:
    by_kind: dict[str, float] = {}
    for lane, kind, _, _, length, _ in spans:
        if lane == "compute":
            by_kind[kind] = by_kind.get(kind, 0.0) + length
    sent = sorted((start, start + length) for lane, _, _, start, length, _ in spans if lane == "communication")
    return RankTime(rank, by_kind, _union(sent))


def _union(ranges: Iterable[tuple[float, float]]) -> float:
    total, until = 0.0, 0.0
    for start, end in ranges:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _for_script(found: Timeline, ranks: list[tuple[int, list[Any]]]) -> dict[str, Any]:
    names: dict[str, int] = {}
    numbers_of = {kind: i for i, kind in enumerate(found.kinds)}

    def rows(spans: list[Any], lane: str) -> list[list[Any]]:
        return [
            [numbers_of[kind], names.setdefault(name, len(names)), float(f"{start:.7g}"), float(f"{length:.5g}"), size]
            for at, kind, name, start, length, size in spans
            if at == lane
        ]

    shown = [{"rank": rank, **{lane: rows(spans, lane) for lane in _LANES}} for rank, spans in ranks]
    kinds = [{"name": KINDS[kind][0], "colour": KINDS[kind][1]} for kind in found.kinds]
    return {"end": found.end_s, "kinds": kinds, "names": list(names), "ranks": shown}
