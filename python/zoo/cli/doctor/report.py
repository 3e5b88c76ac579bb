"""Findings, and the report that they make."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

SECTIONS = ("versions", "devices", "kernels", "transfers", "communication", "limits", "packages", "environment")
"""In the order of the report."""
_WIDTH = 110
_NAME = 26


class State(str, Enum):
    """What a finding means for zoo."""

    OK = "ok"
    FACT = "fact"
    """Said for the reader; nothing depends on it."""
    ABSENT = "absent"
    """Optional, and not here."""
    LIMITED = "limited"
    """zoo works, but slower or not at every size."""
    BROKEN = "broken"
    """zoo needs it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        section: one of :data:`SECTIONS`.
        name: what was looked at.
        value: what was found; for people.
        remedy: the command that adds or repairs it, or a sentence where there is no command; "" where nothing is to do.
    """

    section: str
    name: str
    value: str
    state: State = State.OK
    remedy: str = ""

    def __post_init__(self) -> None:
        """Refuse a section that the report does not print.

        Raises:
            ValueError: there is no such section.
        """
        if self.section not in SECTIONS:
            raise ValueError(f"section {self.section!r}; allowed are {', '.join(SECTIONS)}.")

    def to_dict(self) -> dict[str, str]:
        """As plain values."""
        return {**asdict(self), "state": self.state.value}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Finding:
        """The other way round.

        Raises:
            ValueError: keys are missing or unknown, or a state or section that there is not.
        """
        names = {field.name for field in fields(cls)}
        if set(given) != names:
            raise ValueError(
                f"a finding has the keys {', '.join(sorted(names))}; given are {', '.join(sorted(given))}."
            )
        return cls(**{**given, "state": State(given["state"])})


@dataclass(frozen=True)
class Report:
    """Everything that was found."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing that zoo needs is broken."""
        return not self.of(State.BROKEN)

    def of(self, state: State) -> list[Finding]:
        """The findings in this state, in the order of the report."""
        return [finding for finding in self._sorted() if finding.state is state]

    def to_dict(self) -> dict[str, Any]:
        """As plain values: ``healthy``, and ``findings`` in the order of the report."""
        return {"healthy": self.healthy, "findings": [finding.to_dict() for finding in self._sorted()]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Report:
        """The other way round.

        Raises:
            ValueError: see :meth:`Finding.from_dict`.
        """
        return cls(tuple(Finding.from_dict(finding) for finding in given["findings"]))

    def _sorted(self) -> list[Finding]:
        return sorted(self.findings, key=lambda finding: SECTIONS.index(finding.section))

    def text(self, *, problems: bool = True) -> str:
        """For people: a block a section, what is to be done below what it is about, and a verdict.

        Args:
            problems: also what is absent, limited or broken, and the verdict.
        """
        lines: list[str] = []
        section = ""
        for finding in self._sorted():
            if not problems and finding.state not in (State.OK, State.FACT):
                continue
            if finding.section != section:
                section = finding.section
                lines += ["", section] if lines else [section]
            lines += _lines(finding)
        return "\n".join([*lines, "", self.verdict()] if problems else lines)

    def verdict(self) -> str:
        """One sentence."""
        counts = {state: len(self.of(state)) for state in State}
        less = [f"{n} limited" for n in (counts[State.LIMITED],) if n] + [
            f"{n} optional absent" for n in (counts[State.ABSENT],) if n
        ]
        rest = f" ({', '.join(less)})" if less else ""
        if not self.healthy:
            names = ", ".join(finding.name for finding in self.of(State.BROKEN))
            return f"zoo does not work here as it should: {names}{rest}."
        return f"zoo works here{rest}."


def _lines(finding: Finding) -> list[str]:
    mark = "" if finding.state is State.FACT else finding.state.value
    head = f"  {mark:<9}{finding.name:<{_NAME}}"
    body = _wrapped(finding.value, " " * len(head)) or [""]
    lines = [head + body[0].strip(), *body[1:]]
    if finding.remedy:
        lines += [f"           -> {part}" for part in finding.remedy.splitlines()]
    return [line.rstrip() for line in lines]


def _wrapped(text: str, indent: str) -> Sequence[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def human(num_bytes: float) -> str:
    """``23.4 GiB`` of so many bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
