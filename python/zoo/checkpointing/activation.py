"""Names of ``zoo.activation_checkpointing`` where they were before; nothing is imported until one is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("zoo.activation_checkpointing"), name)
