"""Small complete training tasks, usable by name in a config and short enough to copy."""

from __future__ import annotations

from pathlib import Path

__all__ = ["configuration", "names"]


def names() -> list[str]:
    """The examples that have a configuration: what ``zoo train NAME`` takes in the place of a file."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/config.json"))


def configuration(name: str) -> Path:
    """The file with the configuration of an example.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in names():
        raise ValueError(f"no example is named {name!r}; known: {', '.join(names())}.")
    return Path(__file__).parent / name / "config.json"
