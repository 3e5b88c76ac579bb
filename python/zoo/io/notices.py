"""What was decided against the first choice is said once a process."""

from __future__ import annotations

import logging

_logger = logging.getLogger("zoo.io")
_said: set[str] = set()


def once(sentence: str, *, level: str = "warning") -> None:
    """Log ``sentence`` the first time it comes."""
    if sentence not in _said:
        _said.add(sentence)
        getattr(_logger, level)(sentence)
