"""Model compression: quantisation, pruning and distillation schedules."""

from __future__ import annotations

from zoo.registry import Subpackage

__all__ = ["ABOUT"]

__version__ = "0.1.0"

ABOUT = Subpackage(
    name="compression",
    version=__version__,
    summary=("Model compression: quantisation, pruning and distillation schedules; the folder holds no component yet."),
)
"""What the registry tells about this distribution, under the kind "subpackage"."""
