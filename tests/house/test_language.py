"""Start and how-to pages are short, and so are their sentences: 300 words, 16 a sentence, 24 for nine of ten."""

from __future__ import annotations

import pytest
from tests.house.language import Figures, figures
from tests.house.pages import ROOT, pages

PAGES = [page for page in pages() if page.startswith(("docs/start/", "docs/how-to/"))]


def test_there_are_pages() -> None:
    assert len(PAGES) > 10


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short(page: str) -> None:
    found = figures((ROOT / page).read_text(encoding="utf-8"))
    assert found.words <= 300, f"{page}: {found}"


@pytest.mark.parametrize("page", [*PAGES, "README.md", "docs/migration.md"])
def test_sentences_are_short(page: str) -> None:
    found = figures((ROOT / page).read_text(encoding="utf-8"))
    assert found.mean <= 16, f"{page}: {found}"
    assert found.p90 <= 24, f"{page}: {found}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Title\n\nOne two three. Four five!", Figures(sentences=2, words=5, mean=2.5, p90=3)),
        ("`a b c` is [a link](to/some place). ", Figures(1, 4, 4.0, 4)),
        ("```sh\nzoo train this is code\n```\n\nOne.", Figures(1, 1, 1.0, 1)),
        ("| a | b |\n|---|---|\n| one two | three |\n", Figures(0, 5, 0.0, 0)),
        ("- one two\n- three", Figures(2, 3, 1.5, 2)),
    ],
)  # fmt: skip
def test_what_is_counted(text: str, expected: Figures) -> None:
    assert figures(text) == expected


def test_long_sentences_are_found() -> None:
    assert figures("word " * 25 + ".").p90 == 25
