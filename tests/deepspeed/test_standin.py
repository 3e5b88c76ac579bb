"""Being found as ``deepspeed``: module objects, metadata, children, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks import common

import zoo.deepspeed
from zoo.deepspeed import installed_folder
from zoo.deepspeed.surface import TABLE

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, *, folder: bool = False, **more: str) -> str:
    path = {"PYTHONPATH": str(installed_folder())} if folder else {}
    environment = {**os.environ, **path, **more}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def zoo_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "zoo.cli", "run", *arguments], capture_output=True, text=True)


WHO = """
import importlib.metadata, importlib.util, subprocess, sys
import deepspeed, zoo.deepspeed
import deepspeed.runtime.zero.partition_parameters as a
import zoo.deepspeed.runtime.zero.partition_parameters as b
from deepspeed.runtime.zero import partition_parameters as c
assert deepspeed is zoo.deepspeed and a is b is c and deepspeed.runtime.zero is zoo.deepspeed.runtime.zero
assert a.__name__ == a.__spec__.name == "zoo.deepspeed.runtime.zero.partition_parameters"
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.version("deepspeed") == deepspeed.__version__
assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
assert "torch" not in sys.modules
print(deepspeed.__version__)
"""


def test_one_process_finds_it_by_import_and_by_metadata() -> None:
    assert python("import zoo.deepspeed as d; d.install_as_deepspeed(); d.install_as_deepspeed()" + WHO) == "0.19.8+zoo"


def test_the_folder_on_the_path_does_the_same_and_children_inherit_it() -> None:
    child = "\nprint(subprocess.run([sys.executable, '-c', 'import deepspeed; print(deepspeed.__name__)'], "
    child += "capture_output=True, text=True).stdout)"
    assert python(WHO + child, folder=True).split() == ["0.19.8+zoo", "zoo.deepspeed"]


def test_deepspeed_itself_imported_before_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/__init__.py").write_text("__version__ = '0.1'")
    code = (
        "import deepspeed, zoo.deepspeed\ntry: zoo.deepspeed.install_as_deepspeed()\nexcept RuntimeError as e: print(e)"
    )
    assert "is imported already" in python(code, PYTHONPATH=str(tmp_path))


def test_it_takes_the_place_of_deepspeed_where_that_is_installed(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/__init__.py").write_text("__version__ = '0.1'")
    code = "import zoo.deepspeed\nzoo.deepspeed.install_as_deepspeed()\nimport deepspeed; print(deepspeed.__version__)"
    assert python(code, PYTHONPATH=str(tmp_path)) == "0.19.8+zoo"


def test_what_is_not_there_is_absent_in_the_way_that_programs_probe_for() -> None:
    zoo.deepspeed.install_as_deepspeed()
    import deepspeed

    assert not hasattr(deepspeed, "init_inference_of_tomorrow")
    with pytest.raises(AttributeError, match=r"deepspeed has no 'nothing' in zoo"):
        deepspeed.nothing  # noqa: B018
    with pytest.raises(ImportError, match=r"deepspeed\.nowhere does not exist in zoo \(yet\)"):
        import_module("deepspeed.nowhere")
    with pytest.raises(ImportError, match="nothing"):
        exec("from deepspeed.runtime.engine import nothing")


@pytest.fixture(autouse=True)
def _as_before() -> object:
    """Other tests look for DeepSpeed itself."""
    finders, modules, nickname = list(sys.meta_path), set(sys.modules), zoo.deepspeed.FINDER.nickname
    yield
    sys.meta_path[:] = finders
    zoo.deepspeed.FINDER.nickname = nickname
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] == "deepspeed":
            del sys.modules[name]


def test_a_probe_gets_none_where_an_import_says_why() -> None:
    zoo.deepspeed.install_as_deepspeed()
    assert find_spec("deepspeed.ops.adam") is not None
    for root in ("deepspeed", "zoo.deepspeed"):
        assert find_spec(f"{root}.absent_thing") is None
        assert find_spec(f"{root}.nebula") is None
        with pytest.raises(ModuleNotFoundError, match="Azure's service"):
            import_module(f"{root}.nebula")
    with pytest.raises(ModuleNotFoundError, match="Azure's service"):
        exec("import deepspeed.nebula")
    with pytest.raises(ModuleNotFoundError, match="does not exist in zoo"):
        exec("from deepspeed.absent_thing import anything")
    with pytest.raises(ModuleNotFoundError, match="Azure's service"):
        find_spec("deepspeed.nebula.config")  # whose parent is imported


STAR = """
import sys
for package in ("zoo.moe", "zoo.compression", "zoo.kernels"):
    sys.modules[package] = None  # as if it were not installed
from deepspeed import *
names = "initialize init_distributed zero comm DeepSpeedEngine add_config_arguments checkpointing moe ops pipe runtime"
assert set(names.split()) <= set(globals()), set(names.split()) - set(globals())
import deepspeed
assert (deepspeed.__git_hash__, deepspeed.__git_branch__, deepspeed.git_hash) == ("unknown", "unknown", "unknown")
"""


@pytest.mark.dear
def test_a_star_imports_the_names_of_the_root() -> None:
    python(STAR, folder=True)


METADATA = """
from importlib.metadata import distribution, files, version
for name in ("deepspeed", "DeepSpeed", "DEEPSPEED"):
    assert version(name) == "0.19.8+zoo", name
    assert any(str(path) == "deepspeed/__init__.py" for path in files(name)), name
assert all(path.locate().is_file() for path in files("deepspeed"))
"""


def test_metadata_is_found_in_any_spelling_and_lists_files() -> None:
    python("import zoo.deepspeed as d; d.install_as_deepspeed()" + METADATA)
    python(METADATA, folder=True)


def test_a_part_of_deepspeed_itself_imported_before_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.ops", ModuleType("deepspeed.ops"))
    with pytest.raises(RuntimeError, match=r"deepspeed\.ops .*is imported already"):
        zoo.deepspeed.install_as_deepspeed()


@pytest.mark.dear
def test_zoo_run_starts_scripts_with_their_own_arguments(tmp_path: Path) -> None:
    script = tmp_path / "who.py"
    script.write_text("import sys, deepspeed\nprint(deepspeed.__name__, *sys.argv[1:])")
    found = zoo_run("--as-deepspeed", str(script), "--stage", "3", "--help")
    assert found.stdout.split() == ["zoo.deepspeed", "--stage", "3", "--help"]
    missing = zoo_run("--as-deepspeed", str(tmp_path / "none.py"))
    assert missing.returncode == 2
    assert "there is no file" in missing.stderr


def test_the_version_is_one_and_the_copies_are_copies() -> None:
    version = zoo.deepspeed.__version__
    assert version.endswith("+zoo")
    metadata = installed_folder() / f"deepspeed-{version}.dist-info/METADATA"
    assert f"\nName: deepspeed\nVersion: {version}\n" in metadata.read_text()
    manifest = (ROOT / "dropin/pyproject.toml").read_text()
    assert re.search(r'^version = "([^"]+)"', manifest, re.MULTILINE)[1] == version  # type: ignore[index]
    copy = (ROOT / "dropin/deepspeed/__init__.py").read_text()
    assert copy == (installed_folder() / "deepspeed/__init__.py").read_text()


def test_benchmarks_refuse_it_as_a_peer() -> None:
    code = "from benchmarks import common\ntry: common.refuse_standin()\nexcept SystemExit as e: print(e)"
    path = f"{installed_folder()}:{ROOT}"
    assert "no peer of itself" in python(code, PYTHONPATH=path)
    common.refuse_standin()  # here nothing is installed under that name, or DeepSpeed is


def test_every_module_of_the_tables_can_be_imported_and_every_name_has_a_home() -> None:
    for path, names in TABLE.items():
        module = import_module(f"zoo.deepspeed.{path}" if path else "zoo.deepspeed")
        for name in names if not isinstance(names, str) else ():
            can_be_none = name == "mpu" or name.endswith("_DEFAULT")
            assert getattr(module, name) is not None or can_be_none, f"{path}.{name}"
        assert set(dir(module)) >= set(names if not isinstance(names, str) else ())


def test_the_pages_are_made_of_the_tables() -> None:
    from zoo.deepspeed.page import pages

    found = pages()
    for path, text in found.items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run python -m zoo.deepspeed.page"
    here = {str(page.relative_to(ROOT)) for page in (ROOT / "docs/reference/deepspeed").glob("*.md")}
    assert here == {path for path in found if path.startswith("docs/reference/deepspeed/")}


def test_no_page_of_names_is_longer_than_two_and_a_half_thousand_words() -> None:
    from zoo.deepspeed.page import pages

    found = {path: text for path, text in pages().items() if path.startswith("docs/reference/deepspeed/")}
    assert max(len(text.split()) for text in found.values()) <= 2500
    rows = [line for text in found.values() for line in text.splitlines() if line.startswith("| `deepspeed.")]
    assert len(rows) == len(set(rows)), "every name is on one page"
    config = found["docs/reference/deepspeed/runtime.config.md"]
    assert config.startswith("# deepspeed.runtime.config\n")
    assert "`deepspeed.runtime.config.DeepSpeedConfig`" in config
    assert "`deepspeed.runtime.config_utils." not in config
    assert "`deepspeed.runtime.config_utils." in found["docs/reference/deepspeed/runtime.md"]


def test_the_migration_page_can_be_read_in_one_go() -> None:
    from tests.house.language import figures

    assert figures((ROOT / "docs/migration.md").read_text(encoding="utf-8")).words <= 1500
