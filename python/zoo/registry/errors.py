"""What can go wrong with a name, and the sentence that says how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["BuildError", "DuplicateError", "LoadError", "RegistryError", "UnknownError", "nearest"]


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


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option that looks most like ``name`` (letter case aside), or None when nothing is close."""
    by_lower = {option.lower(): option for option in options}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def alternatives(name: str, options: Iterable[str]) -> str:
    """``did you mean 'x'? known: 'x', 'y'`` or what to say when there is nothing to choose from."""
    known = sorted(options)
    if not known:
        return "nothing is registered there"
    guess = nearest(name, known)
    listed = "known: " + ", ".join(repr(option) for option in known)
    return f"did you mean {guess!r}? {listed}" if guess else listed
