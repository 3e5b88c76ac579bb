"""A device that misbehaves on order, for tests of whatever stands on the engine."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to the transfers of one direction that touch a range of a file.

    Exactly one of ``error``, ``short_bytes`` and ``delay_s`` is given.
    """

    direction: Literal["read", "write"] | None = None
    """None is either."""
    offset: int = 0
    """First byte of the range, in the file."""
    length: int | None = None
    """Bytes of the range; None reaches to the end."""
    times: int | None = None
    """How often; None is always."""
    error: str | None = None
    """Name of an errno, such as ``"EIO"`` or ``"ENOSPC"``."""
    short_bytes: int | None = None
    """Only so many bytes are moved."""
    delay_s: float | None = None
    """It takes so many seconds."""

    def native(self) -> tuple[bool | None, int, int, int | None, str, float]:
        """As the engine wants it."""
        given = {
            "error": self.error,
            "short_bytes": self.short_bytes,
            "delay_s": self.delay_s,
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise ValueError(f"a fault with {named or 'nothing'}; give exactly one of {', '.join(given)}")
        if self.error is not None and not isinstance(getattr(errno, self.error, None), int):
            raise ValueError(f"error = {self.error!r}; allowed are the names in the module errno, such as 'EIO'")
        number = getattr(errno, self.error) if self.error is not None else (self.short_bytes or self.delay_s or 0)
        kind = {"error": "errno", "short_bytes": "short", "delay_s": "delay"}[named[0]]
        if self.direction not in (None, "read", "write"):
            raise ValueError(f'direction = {self.direction!r}; allowed are "read", "write" and None')
        write = None if self.direction is None else self.direction == "write"
        length = (1 << 64) - 1 if self.length is None else self.length
        return write, self.offset, length, self.times, kind, float(number)


@dataclass(frozen=True, kw_only=True)
class Mock:
    """A backend that moves real bytes of real files, out of order and with misfortunes. ``Handle(backend=Mock(...))``.

    What happens depends on ``seed`` and on what is transferred; with one thread, on nothing else.
    """

    seed: int = 0
    """Of the order of completions and of the random short transfers."""
    reorder: bool = True
    """Whether transfers complete in another order than they began in."""
    short: float = 0.0
    """Share of transfers that are short at random, 0 to 1."""
    faults: tuple[Fault, ...] = field(default=())
    """Named misfortunes; the first that fits happens."""

    def native(self) -> tuple[int, bool, int, list[tuple[bool | None, int, int, int | None, str, float]]]:
        """As the engine wants it."""
        if not 0 <= self.short <= 1:
            raise ValueError(f"short = {self.short}; allowed is 0 to 1")
        return self.seed, self.reorder, round(self.short * 255), [fault.native() for fault in self.faults]
