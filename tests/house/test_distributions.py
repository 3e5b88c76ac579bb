"""The four distributions: one version, one licence, and the compiler of CUDA only for who asks for it."""

from __future__ import annotations

import json
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


def test_the_tests_have_every_client_library_in_the_version_of_the_extra() -> None:
    extra = manifest("pyproject.toml")["project"]["optional-dependencies"]["clients"]
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    assert {"transformers", "accelerate"} <= {re.split(r"[<>=]", need)[0] for need in extra}
    assert [need for need in extra if need not in lines] == []
    names = {re.split(r"[<>=;]", need)[0] for need in [*extra, *lines]}
    assert not names & {"torch", "deepspeed"}  # torch is the user's own; zoo is what stands for the other


def test_what_the_recorded_peer_had_is_what_the_extra_asks_for() -> None:
    recorded = json.loads((ROOT / "tests/clients/peers.json").read_text(encoding="utf-8"))["versions"]
    extra = manifest("pyproject.toml")["project"]["optional-dependencies"]["clients"]
    for need in extra:
        name, oldest = re.match(r"([\w-]+)>=([\d.]+)", need).groups()
        assert recorded[name].startswith(f"{oldest}."), f"{name} {recorded[name]} was recorded; the extra says {need}"
