"""What `make setup` asks of a machine before it installs or builds anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def setup(tmp_path: Path, cargo: str | None, rust_version: str = "1.89") -> str:
    """What `scripts/setup.py install` says in a checkout whose Cargo.toml needs ``rust_version``, beside this cargo."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup.py", tmp_path / "scripts")
    text = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    (tmp_path / "Cargo.toml").write_text(re.sub(r'rust-version = "[^"]+"', f'rust-version = "{rust_version}"', text))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, says in (("c++", "c++"), ("cargo", cargo)):
        if says is not None:
            (programs / name).write_text(f"#!/bin/sh\necho '{says}'\n")
            (programs / name).chmod(0o755)
    result = subprocess.run(
        [sys.executable, str(tmp_path / "scripts/setup.py"), "install"],
        env={**os.environ, "PATH": str(programs), "HOME": str(tmp_path), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert not (tmp_path / ".venv").exists()
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(("found", "needed"), [("1.88.0", "1.89"), ("1.89.0", "1.89.1"), ("1.100.0", "2.0")])
def test_a_cargo_older_than_cargo_toml_needs_is_named_with_the_way_to_a_newer_one(
    tmp_path: Path, found: str, needed: str
) -> None:
    said = setup(tmp_path, f"cargo {found} (0123abcde 2025-06-23)", needed)
    assert said == (
        f"zoo: cargo {found} (0123abcde 2025-06-23) is too old: the Rust extension zoo.io._native needs Rust {needed} "
        "or newer; `rustup update stable` brings it, or https://rustup.rs installs it.\n"
    )


def test_a_missing_cargo(tmp_path: Path) -> None:
    assert setup(tmp_path, None) == (
        "zoo: cargo is missing: the Rust extension zoo.io._native needs Rust 1.89 or newer; https://rustup.rs "
        "installs it.\n"
    )


@pytest.mark.parametrize("found", ["cargo 1.100.0 (0123abcde 2027-01-01)", "cargo 1.89.0", "cargo 2.0.0-nightly"])
def test_the_needed_cargo_and_newer_ones_pass(tmp_path: Path, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cargo").write_text(f"#!/bin/sh\necho '{found}'\n")
    (tmp_path / "cargo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", sys.executable)
    subprocess.run([sys.executable, str(ROOT / "scripts/setup.py"), "check"], check=True)


def test_set_up_asks_for_the_version_in_cargo_toml_and_says_it_nowhere_else() -> None:
    needed = re.search(r'^rust-version = "([^"]+)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert needed
    for page in ("scripts/setup.py", "README.md", "CONTRIBUTING.md"):
        others = set(re.findall(r"Rust (\d+\.\d+)", (ROOT / page).read_text(encoding="utf-8"))) - {needed[1]}
        assert others == set(), page


def test_set_up_brings_no_compiler_of_cuda() -> None:
    asked = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    assert "-e ./cuda" in asked
    assert not [line for line in asked if "nv" in line]


@pytest.mark.parametrize("target", ["test-python", "test-slow", "campaign", "laws"])
def test_kernels_that_cannot_be_built_fail_the_tests(target: str, tmp_path: Path) -> None:
    """The commands of the tests ask for native kernels, unless the caller's environment says otherwise."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ZOO_KERNELS=$ZOO_KERNELS"\n')
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "-o", "setup", target, f"BIN={tmp_path}"]
    asked = {k: v for k, v in os.environ.items() if k not in ("ZOO_KERNELS", "MAKEFLAGS", "MAKELEVEL")}
    for environment, wanted in ((asked, "native"), ({**asked, "ZOO_KERNELS": "auto"}, "auto")):
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        said = {line for line in result.stdout.splitlines() if line.startswith("ZOO_")}
        assert said == {f"ZOO_KERNELS={wanted}"}, result
