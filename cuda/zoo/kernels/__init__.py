"""Native operations, one folder each: the maths in a shared header, CPU C++, CUDA and a pure-torch reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo.registry import Subpackage

__all__ = ["ABOUT"]

ABOUT: Subpackage
"""What the registry tells about this distribution, under the kind "subpackage"."""


def __getattr__(name: str) -> Subpackage:
    # Made when it is asked for: the operations need torch and a compiler, and not what the registry is built on.
    if name != "ABOUT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    from zoo.registry import Subpackage

    return Subpackage(
        name="kernels",
        version=version("zoo-kernels"),
        summary=(
            "Native operations, one folder each: the maths in a shared header, CPU C++, CUDA and a pure-torch "
            "reference; compiled on first use."
        ),
    )
