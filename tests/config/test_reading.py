"""Files and command-line values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.config import ConfigError, load
from zoo.config.reading import DocumentError, parse_value, read_overrides, read_source
from zoo.config.strict_yaml import parse


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    first = write(tmp_path, "a.json", '{"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 1e-4}}}')
    second = write(tmp_path, "a.yaml", "train_batch_size: 4\noptimizer: {type: SGD, params: {lr: 1e-4}}\n")
    assert load(first, world_size=1) == load(str(second), world_size=1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"fp16": {"enabled": true, "enabled": false}}', "file a.json: key 'enabled' is given twice"),
        ("a.yml", "seed: 1\nseed: 2\n", "file a.yml: key 'seed' is given twice"),
        ("a.json", '{"seed": }', "file a.json: Expecting value: line 1"),
        ("a.yaml", "a: [", "file a.yaml: while parsing"),
        ("a.json", "[1]", "the document is list"),
        ("a.toml", "", "allowed are .json, .yaml and .yml"),
        ("a.json", '{"a":' * 100_000, "a.json is nested too deeply to be a configuration"),
        ("a.yaml", "[" * 3000, "a.yaml is nested too deeply to be a configuration"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, name, text))
    assert said in str(caught.value)


def test_encodings(tmp_path: Path) -> None:
    for name, text in (("a.json", '{"seed": 3, "train_batch_size": 1}'), ("a.yaml", "seed: 3\ntrain_batch_size: 1\n")):
        path = tmp_path / name
        path.write_bytes(text.encode("utf-8-sig"))
        assert load(path).seed == 3
        for other in ("utf-16", "cp1252"):
            path.write_bytes(text.replace("3", "3 é").encode(other))
            with pytest.raises(ConfigError, match=f"{name} is not UTF-8 "):
                load(path)


def test_a_missing_file_and_a_wrong_source(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="a path or a mapping"):
        read_source(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1e-3", 1e-3),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ('"1"', "1"),
        ("cpu", "cpu"),
        ("a=b", "a=b"),
    ],
)
def test_command_line_values(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)
    assert read_overrides([f"x.y={text}"]) == {"x": {"y": value}}


@examples(times=5)
@given(
    st.dictionaries(st.from_regex(r"[a-z]{1,3}", fullmatch=True), st.integers() | st.booleans() | st.none(), max_size=4)
)
def test_overrides_as_strings_and_as_values_agree(values: dict[str, object]) -> None:
    assert read_overrides([f"a.{key}={value}" for key, value in values.items()]) == read_overrides(
        {f"a.{key}": value for key, value in values.items()}
    )


@pytest.mark.parametrize("path", ["", ".", "a..b", "a."])
def test_paths_with_holes(path: str) -> None:
    with pytest.raises(ConfigError, match="not a dotted path"):
        read_overrides({path: 1})


def test_a_path_below_a_value() -> None:
    with pytest.raises(ConfigError, match="lies below 'a'"):
        read_overrides(["a=1", "a.b=2"])


MERGED = """
train_batch_size: 2
gradient_clipping: 0.5
zero_optimization: &zero
  <<: {stage: 1, overlap_comm: true}
  stage: 2
bf16: {enabled: true}
data_types: {grad_accum_dtype: fp32}
"""


def test_merge_keys_of_yaml_are_read_and_their_keys_may_be_given_again(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(MERGED)
    section = load(path).zero_optimization
    assert (section.stage, section.overlap_comm) == (2, True)
    inner = "b: {c: &c {<<: {x: 1}, x: 2}}\nd: {<<: *c}\ne: {<<: [*c, {y: 3, x: 4}]}\n"
    assert parse(inner) == {"b": {"c": {"x": 2}}, "d": {"x": 2}, "e": {"x": 2, "y": 3}}
    with pytest.raises(DocumentError, match="key 'x' is given twice"):
        parse("a: {<<: {x: 1}, x: 2, x: 3}")
    with pytest.raises(DocumentError, match="key 1 is given twice"):
        parse("a: {1: 1, 0x1: 2}")
    with pytest.raises(DocumentError, match="<< takes a mapping, or a list of them"):
        parse("a: {<<: 5}")


def test_what_contains_itself_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train_batch_size: 2\nzero_optimization: &a\n  stage: *a")
    with pytest.raises(
        ConfigError, match=r"file a\.yaml: .*is nested too deeply to be a configuration, or contains itself"
    ):
        load(path)
    section: dict[str, object] = {}
    section["stage"] = section
    with pytest.raises(ConfigError, match=r"dict: .*is nested too deeply to be a configuration, or contains itself"):
        load({"train_batch_size": 2, "zero_optimization": section})


@pytest.mark.parametrize("size", ["2", 2.5, True, [2]])
def test_a_number_of_ranks_is_a_whole_number(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"world_size is .* \(argument of load\); allowed is a positive integer"):
        load({"train_batch_size": 6}, world_size=size)
