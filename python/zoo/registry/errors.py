"""What can go wrong with a name, and the sentence that says how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["BuildError", "DuplicateError", "LoadError", "RegistryError", "UnknownError", "near", "nearest"]


class RegistryError(ValueError):
    """Base of everything the registry refuses."""


class UnknownError(RegistryError, LookupError):
    """A kind or a name that nobody registered."""


class DuplicateError(RegistryError):
    """A name that two origins claim."""


class LoadError(RegistryError):
    """A component that is registered but cannot be imported."""


class BuildError(RegistryError):
    """A config or runtime argument that the component does not accept."""


def near(name: str, options: Iterable[str], *, count: int = 3) -> list[str]:
    """At most ``count`` options that look like ``name`` (letter case aside), the nearest first."""
    by_lower = {option.lower(): option for option in sorted(options)}
    return [by_lower[found] for found in difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.6)]


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option that looks most like ``name``, or None when nothing is close."""
    return next(iter(near(name, options, count=1)), None)


def alternatives(name: str, options: Iterable[str]) -> str:
    """``did you mean 'x'? known: 'x', 'y'`` or what to say when there is nothing to choose from."""
    known = sorted(options)
    if not known:
        return "nothing is registered there"
    guess = nearest(name, known)
    listed = ", ".join(repr(option) for option in known)
    return f"did you mean {guess!r}? known: {listed}" if guess else f"known: {listed}"
