"""Mixture of experts: gates, expert layers and expert parallelism."""

from __future__ import annotations

from importlib.metadata import version

from zoo.registry import Subpackage

__all__ = ["ABOUT"]

ABOUT = Subpackage(
    name="moe",
    version=version("zoo-moe"),
    summary=("Mixture of experts: gates, expert layers and expert parallelism; the folder holds no component yet."),
)
"""What the registry tells about this distribution, under the kind "subpackage"."""
