"""Numbers as a person reads them: three digits or so and a unit."""

from __future__ import annotations

__all__ = [
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """``num`` in thousands, millions, ...: "1.5 M"; a number below 1000 keeps a space behind it, for a unit.

    Args:
        units: "T", "G", "M", "K", "", "m" or "u"; the largest one in which it is at least 1 if not given.
        precision: digits behind the point.

    Raises:
        ValueError: another unit.
    """
    if units is None:
        units = "" if num == 0 else next((unit for unit, size in _UNITS.items() if abs(num) >= size), "u")
    elif units not in _UNITS:
        raise ValueError(f"units = {units!r}; allowed are {', '.join(map(repr, _UNITS))}, or None for what suits.")
    return f"{round(num / _UNITS[units], precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiply-accumulates: "1.5 GMACs"."""
    return number_to_string(macs, units, precision) + "MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations a second: "1.5 GFLOPS"."""
    return number_to_string(flops, units, precision) + "FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Bytes, in powers of 1000: "1.5 GB"."""
    return number_to_string(b, units, precision) + "B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Parameters; a thousand millions are a B: "1.5 B"."""
    found = number_to_string(params_num, None if units is None else units.replace("B", "G"), precision)
    return found.replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds: "1.5 ms"."""
    return number_to_string(duration, units, precision) + "s"
