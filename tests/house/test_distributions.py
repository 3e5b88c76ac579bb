"""The four distributions: one version, one licence, and the compiler of CUDA only for who asks for it."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"zoo-core": ".", "zoo-kernels": "cuda", "zoo-moe": "moe", "zoo-compression": "compression"}


def manifest(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))


VERSION = manifest("Cargo.toml")["workspace"]["package"]["version"]


@pytest.mark.parametrize("name", FOLDERS)
def test_the_version_is_that_of_cargo_toml(name: str) -> None:
    project = manifest(f"{FOLDERS[name]}/pyproject.toml")
    assert project["project"]["name"] == name
    assert project["project"]["dynamic"] == ["version"]
    assert metadata.version(name) == VERSION
    if name != "zoo-core":  # whose build backend reads it by itself
        source = project["tool"]["hatch"]["version"]
        path = ROOT / FOLDERS[name] / source["path"]
        assert re.findall(source["pattern"], path.read_text(encoding="utf-8"), re.MULTILINE) == [VERSION]


def test_the_core_asks_for_the_kernels_of_its_own_version_and_they_for_nothing_of_zoo() -> None:
    # The default optimizers are in one pass over memory (zoo.optim), which zoo-kernels compiles.
    assert f"zoo-kernels=={VERSION}" in manifest("pyproject.toml")["project"]["dependencies"]
    assert not [need for need in manifest("cuda/pyproject.toml")["project"]["dependencies"] if need.startswith("zoo")]


def test_no_source_says_the_version_again() -> None:
    again = [
        str(path.relative_to(ROOT))
        for top in ("python", "cuda", "moe", "compression", "crates", "scripts")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".rs") and f'"{VERSION}"' in path.read_text(encoding="utf-8")
    ]
    assert again == []


@pytest.mark.parametrize("folder", [*(folder for folder in FOLDERS.values() if folder != "."), "dropin"])
def test_each_distribution_carries_the_licence(folder: str) -> None:
    # A copy, because what is built from a source archive cannot look outside of it.
    assert (ROOT / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert manifest(f"{folder}/pyproject.toml")["project"]["license-files"] == ["LICENSE"]


def test_nothing_asks_for_the_distribution_that_takes_another_name() -> None:
    for folder in FOLDERS.values():
        project = manifest(f"{folder}/pyproject.toml")["project"]
        assert not [need for need in project["dependencies"] if need.startswith("deepspeed")]
    assert "./dropin" not in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
