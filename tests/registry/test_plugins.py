"""Entry points of real distributions: metadata on disk, found the way an installed package is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zoo.registry import DuplicateError, LoadError, Registry, UnknownError, installed


def install(folder: Path, dist: str, points: dict[str, str], **modules: str) -> None:
    """What an installer leaves behind: modules, METADATA and entry_points.txt."""
    folder.mkdir(exist_ok=True)
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    info = folder / f"{dist.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("[zoo.components]\n" + "\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_plug_in_is_found_listed_without_import_and_built(site: Path) -> None:
    source = "class Shout:\n    def __init__(self, *, word):\n        self.word = word.upper()\n"
    install(site, "shouting", {"voice.shout": "zoo_test_shouting:Shout"}, zoo_test_shouting=source)
    registry = Registry(discover=installed)
    assert registry.names("voice") == ["shout"]
    assert "zoo_test_shouting" not in sys.modules
    assert registry.build("voice", "shout", {"word": "a"}).word == "A"
    assert str(registry.entry("voice", "shout")) == "zoo_test_shouting:Shout from shouting 1.2"


def test_two_distributions_with_one_name_break_that_name_only(site: Path) -> None:
    install(site, "left-pack", {"voice.same": "json:loads", "voice.left": "json:loads"})
    install(site, "right-pack", {"voice.same": "json:dumps", "voice.right": "json:dumps"})
    registry = Registry(discover=installed)
    assert registry.names("voice") == ["left", "right", "same"]
    registry.get("voice", "left")
    with pytest.raises(DuplicateError) as caught:
        registry.get("voice", "same")
    assert "json:loads from left-pack 1.2" in str(caught.value)
    assert "json:dumps from right-pack 1.2" in str(caught.value)
    assert any("voice 'same'" in problem for problem in registry.problems())
    with registry.override("voice", "same", print):
        assert registry.get("voice", "same") is print


def test_a_plug_in_may_not_take_a_name_of_the_table(site: Path) -> None:
    install(site, "taker", {"voice.mine": "json:dumps"})
    registry = Registry({"voice": {"mine": "json:loads"}}, origin="house", discover=installed)
    with pytest.raises(DuplicateError, match=r"from house and by json:dumps from taker 1\.2"):
        registry.get("voice", "mine")


def test_broken_entry_points_hurt_only_those_who_ask_for_them(site: Path) -> None:
    install(
        site,
        "broken",
        {"voice.good": "json:loads", "voice.bad": "zoo_test_broken:x", "nodot": "json:loads", "voice.form": "json"},
        zoo_test_broken="raise RuntimeError('out of order')",
    )
    registry = Registry(discover=installed)
    registry.get("voice", "good")
    with pytest.raises(LoadError, match=r"voice 'bad' .*from broken 1\.2.*RuntimeError: out of order"):
        registry.get("voice", "bad")
    problems = "\n".join(registry.problems())
    assert "entry point 'nodot' of broken 1.2: its name is not <kind>.<name>" in problems
    assert "'module:attribute'" in problems
    with pytest.raises(UnknownError, match="'nodot' of broken"):
        registry.get("voice", "nodot")


def test_importing_the_registry_imports_nothing_heavy() -> None:
    code = (
        "import sys, zoo.registry as r; r.kinds(); r.problems(); "
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_distributions_of_this_repository_register_themselves() -> None:
    registry = Registry(discover=installed)
    for name in ("kernels", "moe", "compression"):
        about = registry.get("subpackage", name)
        assert about.name == name
        assert registry.entry("subpackage", name).origin == f"zoo-{name} {about.version}"
