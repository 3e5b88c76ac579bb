"""Numbers of files as text, and checks of what files say: anything may stand in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["count", "cut", "in_bytes", "number", "numbers", "rounded", "span"]

LONGEST = 300


def cut(value: Any, most: int = LONGEST) -> str:
    """As text, of which at most so much is shown."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(table: Mapping[str, Any], key: str) -> list[float]:
    """A list of finite numbers; empty where it is something else."""
    found = table.get(key)
    values = [number(v) for v in found] if isinstance(found, list) else []
    return [v for v in values if v is not None] if None not in values else []


def rounded(value: float, digits: int = 5) -> float | int:
    """For the page: so many digits are more than a screen shows."""
    found = float(f"{value:.{digits}g}")
    return int(found) if found == int(found) and abs(found) < 2**53 else found


def count(value: float) -> str:
    """1,234,567."""
    return f"{value:,.0f}"


def in_bytes(value: float) -> str:
    """1.23 MiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    place = 0
    while abs(value) >= 1024 and place < len(units) - 1:
        value, place = value / 1024, place + 1
    return f"{value:,.0f} {units[place]}" if place == 0 or value >= 1000 else f"{value:.3g} {units[place]}"


def span(seconds: float) -> str:
    """2 h 5 min."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60) if seconds >= 3600 else int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60} min" if seconds >= 3600 else f"{minutes} min {int(seconds % 60)} s"
