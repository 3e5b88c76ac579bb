"""`ConfigError`: everything that is wrong with a configuration, in one go."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """All problems of one document (``problems``): one sentence each, beginning with the dotted path of its key."""

    def __init__(self, problems: Iterable[str] | str, where: str = "configuration") -> None:
        self.problems = [_one_line(problem) for problem in ([problems] if isinstance(problems, str) else problems)]
        self.where = where
        head = self.problems[0] if len(self.problems) == 1 else f"{len(self.problems)} problems"
        rest = "" if len(self.problems) == 1 else "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"{where}: {head}{rest}")


def _one_line(text: str) -> str:
    """Control characters of keys and values as their escapes, so that a sentence stays one line."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
