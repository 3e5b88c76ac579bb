"""Model compression: quantisation, pruning and distillation schedules."""

from __future__ import annotations

from importlib.metadata import version

from zoo.registry import Subpackage

__all__ = ["ABOUT"]

ABOUT = Subpackage(
    name="compression",
    version=version("zoo-compression"),
    summary=("Model compression: quantisation, pruning and distillation schedules; the folder holds no component yet."),
)
"""What the registry tells about this distribution, under the kind "subpackage"."""
