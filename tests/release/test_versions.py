"""One version: every file says it, and so does the tag."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from scripts.release import versions
from scripts.release.versions import PLACES, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that say the version."""
    for path in [*dict.fromkeys(place.path for place in PLACES), "CHANGELOG.md"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def test_all_files_say_one_version() -> None:
    assert versions.problems(tags=[]) == []


def test_a_distribution_that_asks_for_zoo_asks_for_this_version() -> None:
    version = versions.found()["Cargo.toml"][0]
    for path in ("pyproject.toml", *(f"{name}/pyproject.toml" for name in ("cuda", "moe", "compression", "dropin"))):
        needs = tomllib.loads((ROOT / path).read_text())["project"]["dependencies"]
        assert [need for need in needs if need.startswith("zoo-") and not need.endswith(f"=={version}")] == [], path


@pytest.mark.parametrize("path", [*dict.fromkeys(place.path for place in PLACES if place.path != "Cargo.toml")])
def test_a_file_that_says_another_is_named(copy: Path, path: str) -> None:
    version = versions.found()["Cargo.toml"][0]
    text = (copy / path).read_text()
    for place in PLACES:
        if place.path == path:
            text = re.sub(place.pattern, lambda m: m[0].replace(version, "9.9.9"), text, count=1, flags=re.MULTILINE)
    (copy / path).write_text(text)
    (said,) = versions.problems(copy, [])
    assert said.startswith(f"{path}: has ['9.9.9'")


def test_another_version_is_written_everywhere(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    versions.write("1.23.4", copy)
    assert versions.problems(copy, ["v1.23.4", "other"]) == []
    assert versions.found(copy)["conda/recipe.yaml"] == ["1.23.4"]
    assert "write in CHANGELOG.md what 1.23.4 has changed" in capsys.readouterr().out
    assert "0.1.0" not in (copy / "pyproject.toml").read_text()
    tomllib.loads((copy / "Cargo.lock").read_text())
    before = {path: (copy / path).read_text() for path in versions.found(copy)}
    versions.write("1.23.4", copy)
    assert before == {path: (copy / path).read_text() for path in versions.found(copy)}


@pytest.mark.parametrize("given", ["", "1", "1.2", "v1.2.3", "1.2.3-rc1", "1.2.3; rm", "1.2.3\n"])
def test_what_is_no_version_is_refused_and_changes_nothing(copy: Path, given: str) -> None:
    before = versions.found(copy)
    with pytest.raises(SystemExit, match="is no version; give numbers such as"):
        versions.write(given, copy)
    assert versions.found(copy) == before


def test_a_tag_that_is_another_version_stops_the_build(copy: Path) -> None:
    def git(*words: str) -> None:
        own = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *own, *words], cwd=copy, check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "files")
    version = versions.checked(copy)
    git("tag", f"v{version}")
    git("tag", "some-other-tag")
    assert versions.checked(copy) == version
    git("tag", "v8.8.8")
    with pytest.raises(SystemExit, match=rf"the commit has the tag v8\.8\.8, and its files say {version}"):
        versions.checked(copy)


# -- conda, and what else repeats a manifest --------------------------------------------------------------------------

CONDA = {"torch": "pytorch", "hjson": "hjson-py", "matplotlib": "matplotlib-base"}
"""Names that are others there."""


def test_the_conda_recipe_asks_for_what_the_manifests_do() -> None:
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    outputs = {one["package"]["name"]: one for one in recipe["outputs"]}
    folders = {"zoo-core": ".", "zoo-kernels": "cuda", "zoo-moe": "moe", "zoo-compression": "compression"}
    assert outputs.keys() == folders.keys()
    for name, folder in folders.items():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        wanted = {f"python {project['project']['requires-python']}"}
        for need in project["project"]["dependencies"]:
            package, limits = re.match(r"([\w-]+)(.*)", need).groups()  # type: ignore[union-attr]
            if package.startswith("zoo-"):
                limits = "==${{ version }}"
            wanted.add(f"{CONDA.get(package, package)} {limits}")
        there = set(outputs[name]["requirements"]["run"]) - {"cxx-compiler"}
        assert there == wanted, name
        (backend,) = project["build-system"]["requires"]
        assert re.sub(r"(?<=\w)(?=>)", " ", backend, count=1) in outputs[name]["requirements"]["host"]
        assert outputs[name]["package"]["version"] == "${{ version }}"
        where = "." if folder == "." else f"./{folder}"
        assert f"install {where} " in outputs[name]["build"]["script"]
        assert (ROOT / outputs[name]["about"]["license_file"]).is_file()


@pytest.mark.parametrize("path", [*(ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")], ids=lambda path: path.name)
def test_issue_templates_are_forms(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        return
    assert {"name", "description", "body"} <= form.keys()
    assert any(part.get("validations", {}).get("required") for part in form["body"])
    names = [part["id"] for part in form["body"] if "id" in part]
    assert len(names) == len(set(names))


def test_the_citation_is_one() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license", "type"} <= found.keys()
    assert found["license"] == "Apache-2.0"
