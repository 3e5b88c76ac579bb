"""The distribution zoo-kernels, which compressors stand on and the rest of zoo.comm does not."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def _ask(name: str) -> Any:
    try:
        return import_module(f"zoo.kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("zoo.kernels", f"zoo.kernels.{name}"):
            raise
        raise ImportError(
            "compressed communication stands on the distribution zoo-kernels, which is not installed."
        ) from error


def onebit() -> Any:
    """zoo.kernels.onebit."""
    return _ask("onebit")


def quantise() -> Any:
    """zoo.kernels.quantise."""
    return _ask("quantise")
