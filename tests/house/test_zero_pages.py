"""The pages of zoo.zero stay short: one idea a page, short sentences, few words of their own, all of them reachable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.house.pages import ROOT, pages, text

README = "python/zoo/zero/README.md"
PAGES = [README, *(page for page in pages() if page.startswith("docs/zero/"))]


def sentences(page: str) -> list[str]:
    """Of paragraphs and lists; code between backquotes is one word."""
    plain = re.sub(r"^( *)```.*?^\1```$", "\n", text(page), flags=re.DOTALL | re.MULTILINE)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", plain))
    lines = ["" if line.startswith(("|", "#", "    ")) else line for line in plain.splitlines()]
    lines = [f"\n{line}" if re.match(r" *(-|\d+\.) ", line) else line for line in lines]
    paragraphs = [" ".join(found.split()) for found in re.split(r"\n\s*\n", "\n".join(lines))]
    return [found for paragraph in paragraphs for found in re.split(r"(?<=[.?!:;])\*{0,2} ", paragraph)]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_have_at_most_twenty_words(page: str) -> None:
    long = [found for found in sentences(page) if len([word for word in found.split() if re.search(r"\w", word)]) > 20]
    assert not long, f"{page}: make two sentences of {long}"


def test_the_first_page_is_a_page() -> None:
    assert len(text(README).splitlines()) <= 130


def test_each_page_is_reached_from_the_first() -> None:
    linked = set(re.findall(r"docs/zero/[\w.]+", text(README)))
    assert linked == {str(path.relative_to(ROOT)) for path in (ROOT / "docs/zero").glob("*.md")}


def test_the_glossary_has_at_most_25_words() -> None:
    words = re.findall(r"^\| (?!word )([\w ,]+) \|", text("docs/zero/glossary.md"), re.MULTILINE)
    assert 20 < len(words) <= 25
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("page", PAGES)
def test_sources_that_the_pages_name_exist(page: str) -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|md))`", text(page))
    tops = ("python", "tests", "benchmarks", "docs")
    missing = [name for name in named if not any(found for top in tops for found in (ROOT / top).rglob(Path(name).name)
                                                 if str(found).endswith(f"/{name}"))]  # fmt: skip
    assert not missing
