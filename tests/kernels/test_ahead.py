"""Libraries that come with a wheel: which of them fits, and what happens where none does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zoo.kernels.building import BuildError, ahead, build_ahead, built_ahead, name_ahead

RUN = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO)
from zoo.kernels import loading
from zoo.kernels.building import ahead
ahead.FOLDER = Path(sys.argv[1])
assert loading.native(), loading.why_not()
"""


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Load the library in a new process; without a compiler unless PATH says otherwise."""
    with_path = {
        **os.environ,
        "PATH": str(Path(sys.executable).parent),
        "CXX": "",
        "ZOO_KERNELS": "auto",
        **environment,
    }
    return subprocess.run([sys.executable, "-c", RUN, str(folder)], env=with_path, capture_output=True, text=True)


@pytest.mark.slow
def test_a_library_that_came_along_runs_where_nothing_can_be_compiled(tmp_path: Path) -> None:
    built = build_ahead(tmp_path / "ahead")
    assert (built.name, built.parent) == (name_ahead(), tmp_path / "ahead")
    found = run(tmp_path / "ahead", ZOO_CACHE_DIR=str(tmp_path / "cache"))
    assert found.returncode == 0, found.stderr
    assert not (tmp_path / "cache").exists()
    without = run(tmp_path / "elsewhere", ZOO_CACHE_DIR=str(tmp_path / "cache"))
    assert without.returncode != 0
    assert "there is no C++ compiler" in without.stderr


@pytest.mark.slow
def test_one_that_does_not_load_is_told_and_one_is_compiled(tmp_path: Path) -> None:
    (tmp_path / name_ahead()).write_bytes(b"no library")
    found = run(tmp_path, PATH=os.environ["PATH"])
    assert found.returncode == 0, found.stderr
    assert "the library that came with zoo-kernels does not load here, so one is compiled" in found.stderr
    # Where that cannot be done either, the sentence is about what can be changed.
    without = run(tmp_path)
    assert without.returncode != 0
    assert "there is no C++ compiler" in without.stderr


def test_only_the_same_torch_processor_and_sources_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "FOLDER", tmp_path)
    assert built_ahead() is None
    version = torch.__version__.partition("+")[0]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", f"{version}+cu999")
        (tmp_path / name_ahead()).touch()
    assert built_ahead() == tmp_path / name_ahead()
    changes: list[tuple[object, str, object]] = [
        (torch, "__version__", f"{version}.1"),
        (ahead.platform, "machine", lambda: "aarch64"),
        (ahead, "source_files", lambda *_: []),
    ]
    for where, what, value in changes:
        with monkeypatch.context() as patched:
            patched.setattr(where, what, value)
            assert built_ahead() is None


def test_without_a_folder_no_source_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise AssertionError("the sources were read for a name that nothing can have")

    monkeypatch.setattr(ahead, "FOLDER", tmp_path / "ahead")
    monkeypatch.setattr(ahead, "name_ahead", refuse)
    assert built_ahead() is None


def test_what_cannot_be_compiled_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(plan: object) -> Path:
        raise BuildError("no")

    monkeypatch.setattr(ahead, "build", failing)
    with pytest.raises(BuildError):
        build_ahead(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_hook_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """Through the build backend, as an installer calls it."""
    pytest.importorskip("hatchling")
    for folder in ("cuda",):
        shutil.copytree(Path(__file__).parents[2] / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(Path(__file__).parents[2] / "Cargo.toml", tmp_path)
    call = "from hatchling.build import build_wheel; build_wheel('.')"
    environment = {**os.environ, "ZOO_WHEEL_KERNELS": "gpu"}
    found = subprocess.run(
        [sys.executable, "-c", call], cwd=tmp_path / "cuda", env=environment, capture_output=True, text=True
    )
    assert "ZOO_WHEEL_KERNELS=gpu; it must be cpu" in found.stderr
