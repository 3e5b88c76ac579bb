"""Native operations, one folder each: the maths in a shared header, CPU C++, CUDA and a pure-torch reference."""

from __future__ import annotations

from zoo.registry import Subpackage

__all__ = ["ABOUT"]

__version__ = "0.1.0"

ABOUT = Subpackage(
    name="kernels",
    version=__version__,
    summary=(
        "Native operations, one folder each: the maths in a shared header, CPU C++, CUDA and a pure-torch reference; "
        "compiled on first use."
    ),
)
"""What the registry tells about this distribution, under the kind "subpackage"."""
