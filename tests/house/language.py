"""How long a page and its sentences are: ``python -m tests.house.language PAGE ...`` prints it."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import NamedTuple


class Figures(NamedTuple):
    """Of a page: sentences of its text, words of text and tables, words a sentence: mean, and what nine of ten keep."""

    sentences: int
    words: int
    mean: float
    p90: int


def sentences(text: str) -> list[str]:
    """Of paragraphs and lists, without titles, tables and blocks of code; code between backquotes is one word."""
    plain = _plain(text)
    lines = ["" if line.startswith(("|", "#", "    ", "![")) else line for line in plain.splitlines()]
    lines = [f"\n{line}" if re.match(r" *(-|\d+\.) ", line) else line for line in lines]
    paragraphs = [" ".join(found.split()) for found in re.split(r"\n\s*\n", "\n".join(lines))]
    found = [sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.?!])\*{0,2} ", paragraph)]
    return [sentence for sentence in found if _words(sentence)]


def figures(text: str) -> Figures:
    """Of a page of Markdown."""
    lengths = sorted(len(_words(sentence)) for sentence in sentences(text))
    tables = [line for line in _plain(text).splitlines() if line.startswith("|")]
    words = sum(lengths) + sum(len(_words(line)) for line in tables)
    if not lengths:
        return Figures(0, words, 0.0, 0)
    return Figures(len(lengths), words, sum(lengths) / len(lengths), lengths[math.ceil(0.9 * len(lengths)) - 1])


def _plain(text: str) -> str:
    plain = re.sub(r"^( *)```.*?^\1```$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", plain))


def _words(text: str) -> list[str]:
    return [word for word in text.split() if re.search(r"\w", word)]


def main() -> None:
    for page in sys.argv[1:]:
        found = figures(Path(page).read_text(encoding="utf-8"))
        print(f"{page}: {found.words} words, {found.mean:.1f} a sentence, p90 {found.p90}")


if __name__ == "__main__":
    main()
