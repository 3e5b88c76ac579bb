"""The site: pages are near its front, links become what a site has, and its tables say what their sources say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts.pages import compositions
from tests.house.pages import ROOT, text

NEW = "".join(
    f"""
def {name}():
    {body}
"""
    for name, body in (
        ("helper", "return {'zero_optimization': CONFIG}"),
        ("test_one", "helper()"),
        ("test_other", "pass"),
    )
)


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    """The names of docs/conf.py."""
    names: dict[str, Any] = {"__file__": str(ROOT / "docs/conf.py")}
    exec((ROOT / "docs/conf.py").read_text(encoding="utf-8"), names)
    return names


def links(page: str) -> set[str]:
    found = set()
    for target in re.findall(r"\]\(([^)#\s]+\.md)", text(page)):
        if not target.startswith("http"):
            found.add(str(((ROOT / page).parent / target).resolve().relative_to(ROOT)))
    return found


def test_start_how_to_and_concept_pages_are_two_clicks_from_the_readme() -> None:
    once = links("README.md")
    twice = once.union(*(links(page) for page in once))
    folders = [ROOT / "docs" / name for name in ("start", "how-to", "concepts", "reference")]
    pages = {str(path.relative_to(ROOT)) for folder in folders for path in folder.glob("*.md")}
    assert pages <= twice | {"docs/reference/packages.md", "docs/reference/records.md"}
    assert {page for page in pages if page.startswith("docs/start/")} <= once


def test_links_to_sources_become_words_and_links_to_pages_stay(site: dict[str, Any]) -> None:
    resolve: Callable[[str, str], str | None] = site["resolve"]
    assert resolve("docs/how-to/experts.md", "../../moe/README.md#gates") == "../../moe/README.md#gates"
    assert resolve("README.md", "moe") == "moe/README.md"
    assert resolve("README.md", "docs/zero") is None
    assert resolve("README.md", "python/zoo/cli/app.py") is None
    assert resolve("README.md", "docs/loss.png") == "docs/loss.png"
    assert resolve("README.md", "https://example.org/a") == "https://example.org/a"
    with_links: Callable[[str, str], str] = site["with_links"]
    assert (
        with_links("README.md", "see [`app`](python/zoo/cli/app.py), [moe](moe)") == "see `app`, [moe](moe/README.md)"
    )
    code = "```\n[a](python/zoo/cli/app.py)\n```"
    assert with_links("README.md", code) == code


def test_every_page_of_the_tables_of_contents_is_there(site: dict[str, Any]) -> None:
    for page, parts in site["CONTENTS"].items():
        assert (ROOT / f"{page}.md").is_file()
        for _, patterns in parts:
            for pattern in patterns:
                assert list(ROOT.glob(pattern)), f"{page}: {pattern} is no page"


def test_a_test_has_the_features_of_what_it_uses() -> None:
    source = "CONFIG = {'offload_optimizer': 1}\n" + NEW
    found = dict(compositions.functions(source))
    assert set(found) == {"test_one", "test_other"}
    assert "offload_optimizer" in found["test_one"]
    assert "zero_optimization" in found["test_one"]
    assert "offload_optimizer" not in found["test_other"]


def test_compositions_are_those_of_files_with_both(tmp_path: Path) -> None:
    folder = tmp_path / "tests/laws"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text("CONFIG = {'offload_optimizer': 1}\n" + NEW)
    (folder / "test_b.py").write_text("def test_c():\n    DiLoCo\n")
    found = {pair: tests for pair, tests in compositions.tested(tmp_path).items() if tests}
    assert found == {("ZeRO", "offloading"): ["tests/laws/test_a.py::test_one"]}
