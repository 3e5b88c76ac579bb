"""Messages of zoo with their causes: the data of ``messages.yaml``, and the search for a message that somebody has."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["HOLE", "Message", "find", "messages", "page"]

HOLE = "…"
"""Stands in a message for what differs: a number, a name, a path."""
ENOUGH = 0.6
"""Part of its words that a message must share with what was given to be near."""

HEAD = """# Messages

What zoo says when something cannot be, why, and what to do. `zoo explain "message"` finds one of them; … stands for
what differs from case to case. Made by `make pages` from `python/zoo/cli/explaining/messages.yaml`.
"""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message: the part that says it (``zoo.engine``), its text with holes, why, and what to do."""

    part: str
    text: str
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"{self.part}: … {self.text} …\n  cause: {self.cause}\n  fix:   {self.fix}"


@cache
def messages() -> tuple[Message, ...]:
    """All messages, as the file lists them."""
    import yaml

    found = yaml.safe_load((Path(__file__).parent / "messages.yaml").read_text(encoding="utf-8"))
    return tuple(Message(**{key: str(value) for key, value in entry.items()}) for entry in found)


def find(given: str, among: tuple[Message, ...] | None = None, *, at_most: int = 3) -> tuple[bool, list[Message]]:
    """The messages that ``given`` is or contains, and True; or those that are near, the nearest first, and False.

    A message is contained if the texts between its holes stand in ``given`` in their order, whatever is between them;
    or if ``given`` (12 letters or more) is a part of it.
    """
    wanted = _plain(given)
    every = messages() if among is None else among
    exact = [one for one in every if _contains(wanted, one.text) or (len(wanted) >= 12 and wanted in _plain(one.text))]
    if exact:
        return True, sorted(exact, key=lambda one: -len(one.text))[:at_most]
    scored = sorted(((nearness(wanted, _plain(one.text)), -i) for i, one in enumerate(every)), reverse=True)
    return False, [every[-i] for score, i in scored[:at_most] if score >= ENOUGH]


def nearness(given: str, text: str) -> float:
    """From 0 to 1: which part of the words of the shorter one have a like one in the other."""
    ours, theirs = re.findall(r"\w+", given), re.findall(r"\w+", text)
    short, long = sorted((ours, theirs), key=len)
    if len(short) < 2:
        return 0.0
    like = sum(len(word) for word in short if difflib.get_close_matches(word, long, 1, 0.8))
    return like / sum(map(len, short))


def page() -> str:
    """``docs/reference/messages.md``."""
    parts, of = [HEAD], ""
    for one in sorted(messages(), key=lambda message: message.part):
        if one.part != of:
            of = one.part
            parts.append(f"\n## {of}\n\n| message | cause | what to do |\n|---|---|---|")
        cells = (f"`{one.text}`", one.cause, one.fix)
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(parts) + "\n"


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _contains(given: str, text: str) -> bool:
    pieces = [_plain(piece) for piece in text.split(HOLE)]
    place = 0
    for piece in pieces:
        found = given.find(piece, place)
        if found < 0:
            return False
        place = found + len(piece)
    return True
