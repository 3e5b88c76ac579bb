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


@pytest.mark.matrix
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


@pytest.mark.parametrize(
    "said",
    [
        "zoo.config.errors.ConfigError: file a.json: zero_optimization.stagee: unknown key; did you mean 'stage'?",
        "ConfigError: file a.json: zzz: unknown key; known here: amp, bf16",
        "optimizer.type: no optimizer is named 'Adamm'; did you mean 'Adam'? known: 'ASGD', 'Adadelta'",
        "no optimizer is named Adamm; did you mean",
        "train_batch_size: given 'many' (str); allowed: a valid integer",
        "optimizer.type: required and not given",
        "zoo: there is no directory 'runs/nothing'",
        "zoo: there is no file 'train.py'; give the path of a Python program.",
        "zoo launch: rank 0 on host localhost failed first, at 16:43:21.007:",
        "rank 0 on host localhost failed first, at 16:43:21.007:",
        "zoo launch: the cause: rank 0 on host localhost: KeyError: 1",
        "the connection to its agent ended before its ranks did (exit code 255)",
        "ended before its ranks did",
        "no rank has printed anything for 60 s (--hang-s); the stacks of rank 0 are in the log",
        "there is no file of hosts 'hosts'; give the path of one, in which each line is",
        "host worker-7 is not in the file of hosts, which has worker-0, worker-1",
        "zoo: job.yaml needs the name of an image that has zoo and the script; give --image.",
        "job.sbatch needs to know how many ranks a node has; give --num_gpus, and --num_nodes.",
        "ValueError: Stage3Optimizer got stage=2; it is stage 3. Leave stage= out, or use ZeroOptimizer.",
        "no parameter of the model requires a gradient: there is nothing to train.",
        "the data set has 3 samples, fewer than a batch of 16; use more data, or a smaller train_batch_size.",
        "train_batch() needs an iterator of batches, or data given to initialize(training_data=...).",
        "engine.backward got None; it takes the mean loss, a tensor of one element.",
        "the configuration has no optimizer section; add one, such as {type: AdamW}.",
    ],
)
def test_what_a_beginner_meets_is_in_the_index(said: str) -> None:
    code, output = run("explain", said)
    assert code == 0, output
    assert "cause: " in output


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.dear
def test_keys_of_the_pages_are_explained() -> None:
    paths = [row.path for found in rows().values() for row in found]
    for path in paths[::60]:
        assert path in explain_key(path)


@pytest.mark.dear
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


@pytest.mark.dear
@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("zero_optimization.stge", "zero_optimization.stage"),
        ("reduce_bucket_sise", "zero_optimization.reduce_bucket_size"),
        ("prefetch", "zero_optimization.prefetch_bucket_size"),
        ("persistence", "zero_optimization.param_persistence_threshold"),
        ("zzzzzzzz", "docs/reference/configuration.md has all of them"),
    ],
)
def test_a_key_that_is_not_there(key: str, near: str) -> None:
    code, output = run("config", "explain", key)
    assert code == 2
    assert f"no key is named {key!r}" in output
    assert near in output


def test_a_key_that_counts_says_what_it_counts() -> None:
    _, output = run("config", "explain", "stage3_prefetch_bucket_size")
    assert "elements" in output
    assert "More" in output


def test_only_what_a_file_gives(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    code, output = run("config", "explain", str(file), "--given")
    assert code == 0
    lines = output.splitlines()
    assert any(line.startswith("zero_optimization.stage = 2 ") for line in lines)
    assert any(line.startswith("train_micro_batch_size_per_gpu = 8 ") and "derived" in line for line in lines)
    assert not any("(default)" in line for line in lines)
    code, output = run("config", "explain", str(file), "--given", "--set", "gradient_clipping=1.0")
    assert "gradient_clipping = 1.0" in output
    code, output = run("config", "explain", "stage", "--given")
    assert code == 2
    code, output = run("config", "explain", str(ROOT / "examples/bytes/config.json"), "--given")
    assert "train.steps = 1200" in output
    assert "(default)" not in output


def test_what_looks_like_a_file_is_one() -> None:
    for name in ("missing.json", "folder/missing"):
        code, output = run("config", "explain", name)
        assert code == 2
        assert "no key is named" not in output
    code, output = run("config", "explain", "stage", "--set", "a=1")
    assert code == 2
    assert "--set goes with a configuration" in output
