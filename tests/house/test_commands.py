"""The commands of start and how-to pages run as they stand, one after the other, in an empty folder with the examples.

Those that train start processes and are slow; the first page trains for minutes and is left to campaigns.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.house.pages import ROOT, answers, blocks, pages, text
from typer.testing import CliRunner

from zoo.cli import app

PAGES = [page for page in pages() if page.startswith(("docs/start/", "docs/how-to/")) and blocks(page, "sh")]
TRAINING = ("launch", "run", "train")
ELSEWHERE = ("pip install",)
"""What the job that tries wheels in an empty environment does."""
SSH = '#!/bin/sh\nshift\nexec sh -c "$*"\n'
"""A host that is this machine, whatever its name."""


def lines(page: str) -> list[str]:
    found = [line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]
    return [line for line in found if not line.startswith(ELSEWHERE)]


def trains(line: str) -> bool:
    words = shlex.split(line)
    return words[0] == "zoo" and words[1] in TRAINING and "--write" not in words


def cases() -> list[Any]:
    found = []
    for page in PAGES:
        costly = any(trains(line) for line in lines(page))
        marks = [pytest.mark.campaign] if page == "docs/start/first-model.md" else [pytest.mark.slow] if costly else []
        found.append(pytest.param(page, marks=marks, id=page))
    return found


def run(line: str, folder: Path, environment: dict[str, str]) -> None:
    program, *words = shlex.split(line)
    assert program in ("zoo", "mkdir"), f"{line}: which program is that?"
    if program == "mkdir":
        subprocess.run([program, *words], cwd=folder, check=True)
    elif not trains(line):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{line}\n{result.output}"
    else:
        if "-H" in words:  # hosts with names that nobody resolves here, and one process on each
            words[1:1] = ["--master-addr", "127.0.0.1", "--num_gpus", "1"]
        command = [sys.executable, "-m", "zoo.cli", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", cases())
def test_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ssh = tmp_path / "ssh.sh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    environment = {**os.environ, "ZOO_LAUNCH_SSH": str(ssh), "OMP_NUM_THREADS": "1"}
    for line in lines(page):
        run(line, tmp_path, environment)


@pytest.mark.parametrize("page", [page for page in PAGES if answers(page)])
def test_commands_print_what_a_page_shows_below_them(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block, shown in answers(page):
        said = "".join(CliRunner().invoke(app, shlex.split(line)[1:]).output for line in block.splitlines())
        for line in filter(None, shown.splitlines()):
            assert line in said.splitlines(), f"{page} shows: {line}\n{said}"


def test_pages_show_what_commands_print() -> None:
    assert sum(len(answers(page)) for page in PAGES) >= 3


SMALLER = "docs/how-to/memory-before-hardware.md"


def test_a_table_of_memory_has_the_figures_of_the_forecast() -> None:
    (options,) = re.findall(r"\(`(--batch 8 [^`]*)`\)", text(SMALLER))
    found = re.findall(r"^\| (\d) \| ([\d.]+) \| ([\d.]+) \|$", text(SMALLER), re.MULTILINE)
    assert [stage for stage, *_ in found] == ["1", "2", "3"]
    model = str(ROOT / "examples/gallery/llama-7b.json")
    for stage, *figures in found:
        for recompute, figure in zip(("none", "full"), figures, strict=True):
            words = ["forecast", model, "--gpus", "8", "--hardware", "h100", "--seq", "4096", *options.split()]
            said = CliRunner().invoke(app, [*words, "--stage", stage, "--recompute", recompute]).output
            assert f"memory of a rank: {figure} of 80 GiB" in said, said


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith(("docs/start/", "docs/how-to/"))])
def test_each_page_has_an_answer_that_runs(page: str) -> None:
    assert blocks(page, "sh") or blocks(page, "python")


def test_programs_of_the_pages_need_nothing_but_this_python() -> None:
    assert {shlex.split(line)[0] for page in PAGES for line in lines(page)} <= {"zoo", "mkdir"}
    assert shutil.which("mkdir")
