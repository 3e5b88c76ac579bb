"""The house itself: one namespace, no hidden imports, documents that are current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests import processes

ROOT = Path(__file__).resolve().parents[2]


def test_zoo_is_a_namespace_without_init() -> None:
    import zoo

    assert getattr(zoo, "__file__", None) is None
    assert not [
        folder for folder in ("python", "cuda", "moe", "compression") if (ROOT / folder / "zoo/__init__.py").exists()
    ]


def test_the_schema_in_docs_is_current() -> None:
    processes.run(ROOT / "scripts/schema.py", "--check", check=True)


def test_the_pages_that_are_made_of_others_are_current() -> None:
    processes.run("from scripts.pages.__main__ import main; import sys; sys.argv.append('--check'); main()", check=True)


def test_every_dependency_is_named_with_its_reason() -> None:
    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    manifests = [
        ROOT / "requirements-dev.txt",
        ROOT / "requirements-mutants.txt",
        *ROOT.glob("pyproject.toml"),
        *ROOT.glob("*/pyproject.toml"),
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in manifests)
    names = {
        name.lower()
        for path in manifests[:2]
        for name in re.findall(r"^([A-Za-z][\w-]*)(?:[<>=].*)?$", path.read_text(), re.MULTILINE)
    }
    names |= {name.lower() for name in re.findall(r'"([A-Za-z][\w-]*)[<>=]=?[^"]*"', text)}
    for crate in ROOT.glob("crates/*/Cargo.toml"):
        for section in re.findall(
            r"^\[[\w-]*dependencies\]\n(.*?)(?=^\[|\Z)", crate.read_text(), re.MULTILINE | re.DOTALL
        ):
            names |= set(re.findall(r"^(\w[\w-]*)(?:\.workspace)? =", section, re.MULTILINE)) - {"zoo-io"}
    missing = sorted(name for name in names if f"`{name}`" not in page)
    assert {"torch", "pydantic", "maturin", "pytest", "thiserror", "pyo3", "proptest", "io-uring"} <= names
    assert missing == []


def test_a_class_variable_says_of_what_type_it_is() -> None:
    # With Python 3.10 pydantic cannot evaluate ClassVar by itself, and what has one cannot be imported.
    bare = re.compile(r"^\s+\w+: ClassVar( =|$)", re.MULTILINE)
    sources = [path for top in ("python", "cuda", "moe", "compression") for path in (ROOT / top).rglob("*")
               if path.suffix in (".py", ".pyi", ".md")]  # fmt: skip
    assert len(sources) > 500
    assert [str(path) for path in sources if bare.search(path.read_text(encoding="utf-8"))] == []


def test_every_subpackage_has_a_readme() -> None:
    packages = [
        path.parent
        for top in ("python", "cuda", "moe", "compression")
        for path in ROOT.glob(f"{top}/zoo/*/__init__.py")
    ]
    assert packages
    assert [str(path) for path in packages if not (path / "README.md").exists()] == []


def test_sources_that_pages_name_exist() -> None:
    kept = ("python", "crates", "cuda", "tests", "benchmarks", "scripts", "docs", "examples", "moe", "compression")
    there = ["/" + str(file.relative_to(ROOT)) for top in kept for file in (ROOT / top).rglob("*.*")]
    for page in (ROOT / "python").rglob("README.md"):
        named = set(re.findall(r"`([\w./-]+\.(?:py|rs|cu|cuh|cpp|h|md))`", page.read_text()))
        missing = [name for name in named if not any(file.endswith("/" + name) for file in there)]
        assert not missing, f"{page.relative_to(ROOT)} names {missing}"


def test_importing_the_foundations_does_not_import_torch() -> None:
    names = [
        name
        for name in ("registry", "config", "layout", "plan", "cost", "launch")
        if (ROOT / "python/zoo" / name / "__init__.py").exists()
    ]
    code = (
        f"import sys, importlib as i; [i.import_module('zoo.' + n) for n in {names}]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.long
def test_importing_zoo_imports_no_compiler_and_makes_no_options() -> None:
    """The compiler takes as long as all of torch: one decorator of ``torch.compiler`` at the level of a module brings
    it. Options that are made, as others' defaults, have pydantic read the entry points of all that is installed."""
    unwanted = {"torch._dynamo", "torch._inductor", "pydantic.plugin._loader"}
    names = ["compression", "deepspeed", "engine", "inference", "moe", "pipe", "tensor", "train", "zero"]
    code = (
        f"import sys, importlib as i; [i.import_module('zoo.' + n) for n in {names}]; "
        f"sys.exit(', '.join({unwanted} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_kernels_compile_nothing_when_they_are_imported_and_layers_bring_no_sharder(tmp_path: Path) -> None:
    code = (
        "import sys, torch, zoo.kernels, zoo.kernels.update, zoo.kernels.loading, zoo.kernels.building, zoo.nn; "
        "zoo.nn.TiledLinear(4, 4, out_splits=2, init_linear=torch.nn.Linear(4, 4)); "
        "sys.exit('zoo.zero' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "ZOO_CACHE_DIR": str(tmp_path / "cache")}, check=True
    )
    assert not (tmp_path / "cache").exists()


def test_the_contracts_catch_what_they_forbid(tmp_path: Path) -> None:
    # A portion of the namespace in front of the real one: zoo.layout importing upwards and torch; a feature, another.
    files = {
        "zoo/layout/__init__.py": "",
        "zoo/layout/bad.py": "import torch\nimport zoo.io\n",
        "zoo/profiling/bad.py": "import zoo.monitor\n",
        "zoo/profiling/__init__.py": "",
        "zoo/tuning/__init__.py": "",
        "zoo/tuning/bad.py": "import zoo.moe\n",
        "zoo/shard/__init__.py": "",
        "zoo/shard/bad.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import zoo.zero.optimizer\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = "from importlinter.cli import lint_imports_command as run; run()"
    command = [sys.executable, "-c", code, "--no-cache", "--config", str(ROOT / ".importlinter")]
    paths = [tmp_path, *(ROOT / folder for folder in ("python", "cuda", "moe", "compression"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "COLUMNS": "200"}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    for importer, imported in (
        ("layout", "zoo.io"),
        ("profiling", "zoo.monitor"),
        ("tuning", "zoo.moe"),
        ("shard", "zoo.zero"),
    ):
        assert f"zoo.{importer} is not allowed to import {imported}" in result.stdout
    assert "zoo.layout.bad -> torch" in result.stdout
