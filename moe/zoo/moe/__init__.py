"""Mixture of experts: gates, expert layers and expert parallelism."""

from __future__ import annotations

from zoo.registry import Subpackage

__all__ = ["ABOUT"]

__version__ = "0.1.0"

ABOUT = Subpackage(
    name="moe",
    version=__version__,
    summary=("Mixture of experts: gates, expert layers and expert parallelism; the folder holds no component yet."),
)
"""What the registry tells about this distribution, under the kind "subpackage"."""
