"""The version: Cargo.toml has it, every other file says the same, and so does the tag."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.compile(r"\d+\.\d+\.\d+")
"""Three numbers, which PEP 440 and Cargo write alike."""


@dataclass(frozen=True)
class Place:
    """Where a version stands.

    Attributes:
        pattern: a regular expression; its group is the version. count: how often it is there.
    """

    path: str
    pattern: str
    count: int = 1


PLACES = (
    Place("Cargo.toml", r'^\[workspace\.package\]\nversion = "([^"]+)"'),
    Place("Cargo.lock", r'^name = "zoo-io(?:-py)?"\nversion = "([^"]+)"', 2),
    Place("pyproject.toml", r'^    "zoo-kernels==([^"]+)"'),
    Place("moe/pyproject.toml", r'^dependencies = \["zoo-core==([^"]+)"\]'),
    Place("compression/pyproject.toml", r'^dependencies = \["zoo-core==([^"]+)"\]'),
    Place("dropin/pyproject.toml", r'"zoo-(?:core|moe|compression)==([^"]+)"', 3),
    Place("CITATION.cff", r"^version: (.+)$"),
    Place("conda/recipe.yaml", r'^  version: "([^"]+)"'),
)


def stop(sentence: str) -> None:
    sys.exit(f"zoo: release: {sentence}")


def found(root: Path = ROOT) -> dict[str, list[str]]:
    """By file the versions that stand there."""
    return {
        place.path: re.findall(place.pattern, (root / place.path).read_text(encoding="utf-8"), re.MULTILINE)
        for place in PLACES
    }


def problems(root: Path = ROOT, tags: list[str] | None = None) -> list[str]:
    """What does not agree, as sentences; none where all is well.

    Args:
        tags: of the commit; None asks git. A commit without a tag is no release, and that is no problem.
    """
    there = found(root)
    (version, *_) = there["Cargo.toml"] or [""]
    said = []
    if not VERSION.fullmatch(version):
        said.append(f"Cargo.toml: the version {version!r} is none; it is numbers such as 0.2.0.")
    for place in PLACES:
        if there[place.path] != [version] * place.count:
            said.append(f"{place.path}: has {there[place.path]}, and Cargo.toml {version}, {place.count} times.")
    log = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)}( |$)", log, re.MULTILINE):
        said.append(f"CHANGELOG.md: has no part ## {version}.")
    for tag in tags if tags is not None else tags_of(root):
        if re.match(r"v\d", tag) and tag != f"v{version}":
            said.append(f"the commit has the tag {tag}, and its files say {version}: `set {tag[1:]}` before the tag.")
    return said


def tags_of(root: Path) -> list[str]:
    """Of the commit that is checked out; none where there is no git."""
    if not (root / ".git").exists():
        return []
    words = ["git", "tag", "--points-at", "HEAD"]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout.split()


def checked(root: Path = ROOT) -> str:
    """The version; stops where something does not agree."""
    said = problems(root)
    if said:
        stop("versions do not agree; `python -m scripts.release set VERSION` makes them:\n  " + "\n  ".join(said))
    return found(root)["Cargo.toml"][0]


def write(version: str, root: Path = ROOT) -> None:
    """Another version in every place; CHANGELOG.md is for who knows what has changed."""
    if not VERSION.fullmatch(version):
        stop(f"{version!r} is no version; give numbers such as 0.2.0.")
    for place in PLACES:
        path = root / place.path
        text = path.read_text(encoding="utf-8")

        def put(match: re.Match[str]) -> str:
            begin, end = match.start(1) - match.start(), match.end(1) - match.start()
            return match[0][:begin] + version + match[0][end:]

        path.write_text(re.sub(place.pattern, put, text, flags=re.MULTILINE), encoding="utf-8")
    log = root / "CHANGELOG.md"
    text = log.read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)}( |$)", text, re.MULTILINE):
        log.write_text(text.replace("\n## ", f"\n## {version}\n\n\n## ", 1), encoding="utf-8")
        print(f"zoo: release: write in CHANGELOG.md what {version} has changed, then commit, and tag it v{version}")
