"""Numbers a user gives."""

from __future__ import annotations


def whole_number(name: str, value: object, low: int, high: int, *, multiple: int = 1) -> None:
    """Raises: ValueError: ``value`` is not an int from ``low`` to ``high``, or not a multiple of ``multiple``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high or value % multiple:
        multiples = f", a multiple of {multiple}" if multiple > 1 else ""
        raise ValueError(f"{name} = {value!r}; allowed is an int from {low} to {high}{multiples}")
