"""``zoo explain`` and ``zoo config explain KEY``: what they find; the index tells of sentences that are there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from zoo.cli import app
from zoo.cli.explaining.messages import HOLE, Message, find, messages
from zoo.config.keys import explain_key
from zoo.config.page import rows

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = {"zoo.moe": "moe/zoo/moe", "zoo.compression": "compression/zoo/compression"}


def text_of(node: ast.AST) -> str | None:
    """A text of the source, with a hole for each value in it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or HOLE) + (text_of(node.right) or HOLE)
    return None


@cache
def texts(part: str) -> list[str]:
    folder = ROOT / PLUGINS.get(part, f"python/{part.replace('.', '/')}")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]
    return [text for tree in trees for node in ast.walk(tree) if (text := text_of(node))]


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


# -- messages ---------------------------------------------------------------------------------------------------------


def test_there_are_enough_and_each_says_something() -> None:
    found = messages()
    assert len(found) >= 60
    assert len({(one.part, one.text) for one in found}) == len(found)
    for one in found:
        assert len(one.text) > 20
        assert one.cause.endswith(".")
        assert one.fix.endswith(".")


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.text[:40])
def test_a_message_is_in_the_sources_of_its_part(message: Message) -> None:
    assert any(message.text in text for text in texts(message.part))


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.text[:40])
def test_what_zoo_says_is_found(message: Message) -> None:
    said = f"rank 1: ValueError: {message.text.replace(HOLE, '4096')} and so on"
    known, found = find(said)
    assert known
    assert message in found


@given(data=st.data())
def test_a_letter_that_is_wrong_leaves_it_near(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from([one for one in messages() if len(one.text.split()) > 6]))
    place = data.draw(st.integers(0, len(message.text) - 1))
    _, found = find(message.text[:place] + "q" + message.text[place + 1 :])
    assert message in found


def test_words_of_something_else_are_not_found() -> None:
    assert find("segmentation fault, core dumped") == (False, [])
    code, output = run("explain", "segmentation fault, core dumped")
    assert code == 2
    assert "no message of the index is like that" in output


def test_the_command_prints_cause_and_fix() -> None:
    code, output = run("explain", "ValueError: '/a/b' has no file 'latest' and no checkpoints: nothing was saved there")
    assert code == 0
    assert output.startswith("zoo.checkpointing: ")
    assert "cause: The folder" in output
    assert "fix:   Look at the path" in output
    code, output = run("explain", "the folder has no chekpoints: nothing were saved there")
    assert code == 0
    assert output.startswith("not one of the index")


# -- keys -------------------------------------------------------------------------------------------------------------


def test_keys_of_the_pages_are_explained() -> None:
    paths = [row.path for found in rows().values() for row in found]
    for path in paths[::60]:
        assert path in explain_key(path)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("zero_optimization.stage", "default"),
        ("stage", "zero_optimization.stage"),
        ("stage3_prefetch_bucket_size", "zero_optimization.prefetch_bucket_size"),
        ("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.prefetch_bucket_size"),
        ("optimizer.params.lr", 'optimizer "AdamW"'),
        ("zero_optimization", "keys of zero_optimization, with their defaults:"),
        ("train_batch_size", "docs/reference/configuration.md"),
        ("amp", "refused"),
    ],
)
def test_what_a_key_does(key: str, said: str) -> None:
    code, output = run("config", "explain", key)
    assert code == 0
    assert said in output


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("zero_optimization.stge", "zero_optimization.stage"),
        ("reduce_bucket_sise", "zero_optimization.reduce_bucket_size"),
        ("zzzzzzzz", "docs/reference/configuration.md has all of them"),
    ],
)
def test_a_key_that_is_not_there(key: str, near: str) -> None:
    code, output = run("config", "explain", key)
    assert code == 2
    assert f"no key is named {key!r}" in output
    assert near in output


def test_what_looks_like_a_file_is_one() -> None:
    for name in ("missing.json", "folder/missing"):
        code, output = run("config", "explain", name)
        assert code == 2
        assert "no key is named" not in output
    code, output = run("config", "explain", "stage", "--set", "a=1")
    assert code == 2
    assert "--set goes with a configuration" in output
