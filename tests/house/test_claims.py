"""What pages claim: examples run as they stand and print what is shown, commands exist, figures are their source's."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer
from tests.house.pages import APART, AT_HAND, RANKS, ROOT, SLOW, blocks, commands, pages, shown, text
from typer.testing import CliRunner

from zoo import registry, sim
from zoo.cli import app
from zoo.config import load

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

# -- Python examples --------------------------------------------------------------------------------------------------


def runs() -> list[Any]:
    """Examples that run in one namespace: (page, their numbers)."""
    found = []
    for page in pages():
        count = len(blocks(page, "python"))
        together = [[i] for i in range(count)] if page in APART else [list(range(count))]
        for numbers in together if count else []:
            marks = [pytest.mark.slow] if page in SLOW else []
            found.append(pytest.param(page, numbers, marks=marks, id=f"{page}:{','.join(map(str, numbers))}"))
    return found


def imports_of(examples: list[str]) -> str:
    """The import statements at the top of examples that a reader has seen before."""
    found = [node for example in examples for node in ast.parse(example).body]
    return "\n".join(ast.unparse(node) for node in found if isinstance(node, (ast.Import, ast.ImportFrom)))


def execute(page: str, numbers: list[int]) -> tuple[dict[str, Any], dict[int, str]]:
    """The names after the examples ran, and what each printed."""
    examples = blocks(page, "python")
    printed: dict[int, str] = {}
    here: list[str] = []
    names: dict[str, Any] = {
        "__name__": "a_reader",
        "print": lambda *what: here.append(" ".join(map(str, what)) + "\n"),
    }
    exec(imports_of(examples[: numbers[0]]), names)
    names.update(AT_HAND.get(page, lambda _: {})(examples[numbers[0]]))
    for number in numbers:
        here.clear()
        # Devices that a reader has are folders here.
        source = re.sub(r'"/(nvme\d*)', lambda match: f'"{Path.cwd() / match[1]}', examples[number])
        exec(compile(source, f"{page}, example {number}", "exec", dont_inherit=True), names)
        printed[number] = "".join(here)
    return names, printed


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("nvme", "nvme0", "nvme1"):
        (tmp_path / name).mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.parametrize(("page", "numbers"), runs())
def test_examples_run_and_print_what_the_page_shows(page: str, numbers: list[int], empty_folder: Path) -> None:
    num_ranks = 8 if "(2, 2, 2)" in blocks(page, "python")[numbers[0]] else RANKS.get(page, 1)
    torch.manual_seed(0)
    with registry.DEFAULT.scope():
        results = sim.run(num_ranks, lambda rank: execute(page, numbers)) if num_ranks > 1 else [execute(page, numbers)]
    for _, printed in results:
        for number, said in printed.items():
            expected = shown(page, number)
            assert expected is None or [line.rstrip() for line in said.splitlines()] == expected.splitlines()


def test_what_examples_come_to(empty_folder: Path) -> None:
    def after(page: str) -> tuple[dict[str, Any], dict[int, str]]:
        return execute(page, list(range(len(blocks(page, "python")))))

    assert after("python/zoo/registry/README.md")[0]["opt"].param_groups[0]["lr"] == 3e-4
    assert after("python/zoo/lr_schedules/README.md")[0]["optimizer"].param_groups[0]["lr"] == pytest.approx(0.001)
    names, printed = after("python/zoo/config/README.md")
    assert "zero_optimization.stage = 1" in printed[0]
    assert names["Gate"].model_validate({"type": "TopK"}).kind == "gate"
    document = {"train_batch_size": 8, "lamp": {"dimmer": {"enabled": True}, "warm_up": False}}
    with pytest.raises(ValueError, match=r"lamp\.dimmer\.enabled: given True; it waits for"):
        load(document, sections={"lamp": names["Lamp"]})
    names, printed = after("python/zoo/monitor/README.md")
    assert printed[0] == "1 2.5\n"


# -- documents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in pages() if blocks(page, "json")])
def test_documents_are_configurations(page: str, empty_folder: Path) -> None:
    examples = blocks(page, "python")
    with registry.DEFAULT.scope():
        if "plugin" in page or any("@registry.register(" in example for example in examples):  # names that they use
            execute(page, list(range(len(examples))))
        for block in blocks(page, "json"):
            found = json.loads(block)
            for document in found if isinstance(found, list) else [found]:
                load({"train_batch_size": 16, **document}, world_size=16)


@pytest.mark.parametrize("page", [page for page in pages() if blocks(page, "toml")])
def test_entry_points_are_of_kinds_that_are_known(page: str) -> None:
    for block in blocks(page, "toml"):
        for key in tomllib.loads(block)["project"]["entry-points"]["zoo.components"]:
            assert key.split(".")[0] in {*registry.kinds(), "engine_part", "sink"}


# -- commands ---------------------------------------------------------------------------------------------------------

WITH_COMMANDS = [page for page in pages() if commands(page)]


def words_of(command: str) -> list[str]:
    """Without variables, comments, and the brackets around what may be left out."""
    plain = re.sub(r"[\[\]]", " ", command) if not command.startswith("pip") else command
    words = shlex.split(plain, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    return words


@functools.cache
def command_of(name: str | None) -> click.Command:
    """The command ``zoo``, or one that a package has registered."""
    found: click.Command = typer.main.get_command(app if name is None else registry.get("command", name))
    return found


def check_zoo(words: list[str]) -> None:
    """Sub-commands and options of ``zoo`` are there."""
    command = command_of(None)
    if words and words[0] in registry.names("command"):
        command, words = command_of(words[0]), words[1:]
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, f"zoo has no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    script = next((place for place, word in enumerate(words) if word.endswith(".py") and "/" in word), len(words))
    if command.name in ("run", "launch") and "-m" in words:
        check_python(words[words.index("-m") :])
        words = words[: words.index("-m")]
    elif command.name in ("run", "launch") and script < len(words):
        check_python(words[script:])
        words = words[:script]
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options, f"{command.name} has {sorted(options)}"


def beside(script: Path) -> list[Path]:
    """The files next to a script that it imports."""
    names = re.findall(r"^from (\w+) import", script.read_text(encoding="utf-8"), re.MULTILINE)
    return [path for name in names if (path := script.with_name(f"{name}.py")).exists()]


def check_python(words: list[str]) -> None:
    """``-m module`` or a script is there, and names the options in its sources."""
    if words[0] == "-m":
        if words[1] == "zoo.cli":
            return check_zoo(words[2:])
        found = importlib.util.find_spec(words[1])
        if found is None or found.origin is None:
            pytest.fail(f"there is no module {words[1]}")
        sources, options = Path(found.origin).parent.rglob("*.py"), words[2:]
    else:
        assert (ROOT / words[0]).is_file(), f"there is no {words[0]}"
        sources, options = iter([ROOT / words[0], *beside(ROOT / words[0])]), words[1:]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for option in options:
        assert not option.startswith("--") or f'"{option}"' in code, f"{words[1]} has no {option}"
    return None


def check_pip(words: list[str]) -> None:
    """Folders and files are there, and extras of this repository's distributions."""
    extras = tomllib.loads(text("cuda/pyproject.toml"))["project"]["optional-dependencies"]
    own = tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"]
    for before, word in zip(["", *words], words, strict=False):
        if match := re.fullmatch(r"\.\[(\w+)\]", word):
            assert match[1] in own, f"zoo-core has no extra {match[1]}"
        elif word.startswith(".") or before == "-r":
            assert (ROOT / word).exists(), f"there is no {word}"
        elif match := re.fullmatch(r"zoo-kernels\[(\w+)\]", word):
            assert match[1] in extras


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_exist(page: str) -> None:
    targets: set[str] = set()
    for command in commands(page):
        program, *words = words_of(command)
        if program == "make":
            targets |= {word for word in words if "=" not in word}
        elif program == "zoo":
            check_zoo([word for word in words if word not in ("...", "|")])
        elif program.startswith("python"):
            check_python(words)
        elif program == "torchrun" and "-m" in words:
            check_python(words[words.index("-m") :])
        elif program == "torchrun" and any(word.endswith(".py") for word in words):
            check_python(words[next(place for place, word in enumerate(words) if word.endswith(".py")) :])
        elif program == "pip":
            check_pip(words)
        elif "/" in program:
            assert (ROOT / program).is_file(), f"there is no {program}"
    if targets:
        known = set(re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE))
        assert targets <= known, f"the Makefile lacks {sorted(targets - known)}"


def test_make_takes_every_target_of_its_help() -> None:
    said = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = [*re.findall(r"make (\w+)", said), *re.sub(r"(?s).*also:", "", said).split()]
    assert {"train", "test", "setup", "wheels", "clean"} <= set(targets)
    known = set(re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE))
    assert set(targets) == known - {"help", "again"}


CHEAP = {
    "zoo --version": "zoo ",
    "zoo components": "AdamW",
    "zoo config explain examples/bytes/config.json": "train.steps = 1200",
    "zoo config schema": '"$defs"',
    "zoo forecast examples/bytes/config.json --ranks 2": "parameters",
}


@pytest.mark.parametrize("command", CHEAP)
def test_cheap_commands_run(command: str, empty_folder: Path) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert CHEAP[command] in result.output


# -- figures, links ---------------------------------------------------------------------------------------------------


def test_figures_of_the_readme_are_in_the_pages_they_come_from() -> None:
    rows = [row for row in text("README.md").splitlines() if row.startswith("|") and "benchmarks/" in row]
    assert len(rows) > 5
    for row in rows:
        *cells, _ = row.strip("|").split("|")
        (source,) = re.findall(r"\]\((benchmarks/\S+?)\)", row)
        page = text(source)
        for figure in re.findall(r"\d+\.\d+", re.sub(r"\(target: \S+\)", "", " ".join(cells))):
            # A cell of a table there, before its range.
            assert re.search(rf"\| *{re.escape(figure)} *(\(|\|)", page), f"{source} has no {figure}: {row}"


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text(page)):
        if re.match(r"https?:", target):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} leads to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            names = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in names, f"{page} leads to {target}#{anchor}"
