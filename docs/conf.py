"""The site: every Markdown page of the repository, where it stands (``make docs`` builds it into build/docs).

The source folder is the root of the repository, so that a link that works between files works on the site. Nothing is
copied: what the site needs beyond the files (tables of contents, links to what is no page) is added while a page is
read.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.pages import compositions  # noqa: E402

project = "zoo"
author = "the authors of zoo"
extensions = ["myst_parser"]
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/**.md",
    "cuda/WRITING.md",
    "python/zoo/**README.md",
    "benchmarks/**.md",
    "examples/**.md",
    *(f"{top}/**README.md" for top in ("cuda", "moe", "compression", "dropin")),
]
exclude_patterns = ["target", "build", "dist", "runs", "tests", "crates", "**/.*", ".*", "**/node_modules"]

html_theme = "furo"
html_title = "zoo"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 6
myst_links_external_new_tab = False
nitpicky = True

# Results begin their parts with the third level of titles.
suppress_warnings = ["myst.header"]

_LINK = re.compile(r"(?<!\!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
PAGES = {".md"}
PICTURES = {".png", ".svg", ".jpg"}

# Page → captions and patterns of the pages below it, in this order.
CONTENTS: dict[str, list[tuple[str, list[str]]]] = {
    "README": [
        ("Start", ["docs/start/*.md"]),
        ("How to", ["docs/how-to/*.md"]),
        ("Concepts", ["docs/concepts/*.md", "docs/architecture.md"]),
        (
            "Reference",
            [
                *("docs/reference/*.md", "docs/migration.md", "docs/dependencies.md", "CONTRIBUTING.md"),
                *("docs/release.md", "CHANGELOG.md", "SECURITY.md"),
            ],
        ),
    ],
    "docs/reference/packages": [
        ("", ["python/zoo/*/README.md", "cuda/README.md", "moe/README.md", "compression/README.md", "dropin/README.md"])
    ],
    "docs/reference/benchmarks": [("", ["benchmarks/**/*.md"])],
    "docs/reference/records": [("", ["docs/campaigns/*.md", "docs/clients/*.md", "docs/dstests/*.md"])],
    "docs/reference/examples": [("", ["examples/**/*.md"])],
    "docs/reference/deepspeed-names": [("", ["docs/reference/deepspeed/*.md"])],
    "docs/reference/configuration": [("", ["docs/reference/config/*.md"])],
    "python/zoo/zero/README": [("", ["docs/zero/*.md"])],
    "python/zoo/shard/README": [("", ["python/zoo/shard/*/README.md"])],
    "python/zoo/data_efficiency/README": [("", ["docs/data_efficiency.md"])],
    "python/zoo/checkpointing/README": [("", ["python/zoo/checkpointing/*/README.md"])],
    "cuda/README": [("", ["cuda/zoo/kernels/README.md", "cuda/WRITING.md"])],
    "moe/README": [("", ["moe/zoo/moe/README.md"])],
    "compression/README": [("", ["compression/zoo/compression/README.md"])],
}


def contents(page: str) -> str:
    """Hidden tables of contents, which make the menu beside a page."""
    found = []
    for caption, patterns in CONTENTS.get(page, []):
        paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern), key=first_readme)]
        names = ["/" + str(path.relative_to(ROOT).with_suffix("")) for path in paths]
        head = [f":caption: {caption}"] if caption else []
        found.append("\n".join(["", ":::{toctree}", ":hidden:", *head, "", *names, ":::", ""]))
    return "\n".join(found)


def first_readme(path: Path) -> tuple[str, bool, str]:
    """The first page of a folder stands before its others."""
    return str(path.parent), path.stem != "README", path.stem


def resolve(page: str, target: str) -> str | None:
    """A link of a page as the site needs it; None for what the site does not have, such as a source file."""
    place, _, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target) or not place:
        return target
    path = (ROOT / page).parent / place
    if path.is_dir():
        path = path / "README.md"
        if not path.is_file():
            return None
        place = os.path.relpath(path, (ROOT / page).parent)
    if path.suffix in PICTURES:
        return target
    return f"{place}#{anchor}" if anchor else place if path.suffix in PAGES else None


def with_links(page: str, text: str) -> str:
    """The text of a page with links that lead to pages; the words of the others stay."""

    def link(match: re.Match[str]) -> str:
        target = resolve(page, match[2])
        return match[1] if target is None else f"[{match[1]}]({target})"

    parts = re.split(r"(?ms)^( *```.*?^ *```$)", text)
    return "".join(
        part if part.lstrip().startswith("```") else _LINK.sub(link, part)
        for part in parts
    )  # fmt: skip


def read(app: Any, name: str, source: list[str]) -> None:
    """What Sphinx calls with each page that it has read."""
    text = with_links(f"{name}.md", source[0])
    if name == "docs/reference/compositions":
        text += "\n" + compositions.table(ROOT)
    source[0] = text + contents(name)


def front(app: Any, error: Exception | None) -> None:
    """index.html leads to the README, which is the front page."""
    if error is None:
        page = '<!doctype html><meta http-equiv="refresh" content="0; url=README.html"><a href="README.html">zoo</a>\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", read)
    app.connect("build-finished", front)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
