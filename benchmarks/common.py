"""What every topic's report is made of: medians over rounds, tables, facts of the machine, remarks that stay."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REMARKS = "## Remarks"


@dataclass(frozen=True)
class Spread:
    """Median and range over rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle of the rounds."""
        return statistics.median(self.values)

    def text(self, digits: int = 2, factor: float = 1.0) -> str:
        """``median (min–max)``."""
        middle, low, high = (f"{v * factor:.{digits}f}" for v in (self.median, min(self.values), max(self.values)))
        return f"{middle} ({low}–{high})"


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Order statistics that hold the true median with this confidence; the range where there are too few values."""
    ordered, n = sorted(values), len(values)
    outside, cut = 0.0, 0
    for k in range((n - 1) // 2):
        outside += 2 * math.comb(n, k) * 0.5**n
        if outside > 1 - confidence:
            break
        cut = k + 1
    return ordered[max(cut - 1, 0)], ordered[n - max(cut, 1)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def refuse_standin() -> None:
    """A peer is the real package: stop where zoo is what is installed under its name.

    Raises:
        SystemExit: the version that is installed as deepspeed ends in "+zoo".
    """
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return
    if version.endswith("+zoo"):
        raise SystemExit(
            f"deepspeed {version} is zoo under that name, and no peer of itself. Uninstall it, take its folder from "
            "PYTHONPATH, and install DeepSpeed (the extra bench)."
        )


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """What the figures depend on, with the versions of these packages; nothing that names the machine."""
    cpu = "unknown CPU"
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = found[1].strip() if found else cpu
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu,
        "python": platform.python_version(),
        **versions,
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
    }


def keep(raw: Any, path: Path) -> None:
    """Raw figures go there as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(raw))


def facts(about: Mapping[str, Any]) -> str:
    """What :func:`machine` gives, as a list."""
    return "\n".join(f"- {key}: {value}" for key, value in about.items())


def write_page(page: Path, text: str) -> None:
    """The page anew, whose remarks stay."""
    page.write_text(f"{text.rstrip()}\n\n{remarks(page)}", encoding="utf-8")


def remarks(page: Path) -> str:
    """The section of a page that is written by hand, to be kept when the page is generated anew."""
    if page.exists() and REMARKS in (text := page.read_text()):
        return text[text.index(REMARKS) :].rstrip() + "\n"
    return f"{REMARKS}\n\nNone yet.\n"
