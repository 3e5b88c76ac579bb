"""What a checkpoint holds beside tensors comes back exactly, types included, or is refused when it is saved."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.checkpointing import CheckpointError, load, save
from zoo.checkpointing.exact import decode, dumps

numbers = st.integers() | st.floats() | st.booleans() | st.none() | st.complex_numbers() | st.binary(max_size=5)
strings = st.text(max_size=5) | st.sampled_from(["__zoo__", "", "1"])
hashable = st.recursive(numbers | strings, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3))
arrays = st.sampled_from(
    [np.float32(1.5), np.int64(3), np.bool_(True), np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((0, 2))]
)
tensors = st.sampled_from(
    [torch.tensor(0.1), torch.zeros(0, 3), torch.tensor([1, 2], dtype=torch.uint16), torch.eye(2, dtype=torch.bfloat16)]
)
values = st.recursive(
    hashable | arrays | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.dictionaries(strings, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(hashable, st.integers(), max_size=3).map(Counter)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 5))
        | st.tuples(inner)
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Equal, with equal types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype is right.dtype and torch.equal(left, right)
    if isinstance(left, (np.ndarray, np.generic)):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        same_sign = math.copysign(1, left) == math.copysign(1, right)
        return (left == right and same_sign) or (math.isnan(left) and math.isnan(right))
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, deque):
        return left.maxlen == right.maxlen and same(list(left), list(right))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (set, frozenset)):  # not by "==": a NaN is equal to nothing, 1 equals True
        return len(left) == len(right) and all(any(same(a, b) for b in right) for a in left)
    return bool(left == right)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@examples(times=5)
@given(values)
def test_every_value_comes_back_with_its_types(value: Any) -> None:
    assert same(decode(json.loads(dumps(value, "it"))), value)


class Colour(enum.IntEnum):
    RED = 1


class Named(str):
    __slots__ = ()


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"a": [1, object()]},
            r"^meta\.a\[1\] is of the type object, which a checkpoint cannot give back exactly; it holds None",
        ),
        ({"a": {2: (len,)}}, r"^meta\.a\[2\]\[0\] is of the type builtin_function_or_method"),
        ({"a": Colour.RED}, r"^meta\.a is of the type .*Colour"),
        ({"a": Named("x")}, r"^meta\.a is of the type .*Named"),
        ({"a": defaultdict(int)}, r"^meta\.a is of the type collections\.defaultdict"),
        ({"a": torch.Size([1])}, r"^meta\.a is of the type torch\.Size"),
        ({("a", Colour.RED): 1}, r"^a key of meta\[1\] is of the type .*Colour"),
        ({"a": torch.nn.Parameter(torch.zeros(1))}, r"^meta\.a is of the type torch\.nn\.parameter\.Parameter"),
        ({"a": torch.eye(2).to_sparse()}, r"^meta\.a is of the type torch\.Tensor, not dense"),
        ({"a": torch.zeros(1, device="meta")}, r"^meta\.a is of the type torch\.Tensor, not dense or without data"),
        ({"a": np.array([object()])}, r"^meta\.a is of the type numpy\.ndarray and holds object"),
        ({"a": "\ud83d\ude00"}, r"^meta\.a is the string .* half of a character"),
        ({"a": CIRCLE}, "^meta contains itself"),
        ({"a": 10**5000}, "^meta cannot be written"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_by_its_place(
    tmp_path: Path, value: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        dumps(value, "meta")
    with pytest.raises(CheckpointError, match=said.lstrip("^")):
        save(tmp_path, "one", [], meta=value)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_gives_its_meta_back(tmp_path: Path) -> None:
    meta = {"milestones": Counter({3: 1, 5: 2}), "betas": (0.9, 0.99), 7: "seven", "plain": {"a": [1, None]}}
    save(tmp_path, "one", [], meta=meta)
    assert same(load(tmp_path).meta, meta)


def test_a_kind_of_value_that_is_not_known_is_said(tmp_path: Path) -> None:
    save(tmp_path, "one", [], meta={"a": (1,)})
    path = tmp_path / "one" / "manifest.json"
    path.write_text(path.read_text().replace('"tuple"', '"hexagon"'))
    with pytest.raises(CheckpointError, match="kind 'hexagon' is not known; a newer zoo"):
        load(tmp_path)


def test_checkpoints_of_the_version_before_are_read(tmp_path: Path) -> None:
    """Version 1 wrote what JSON held, as it was."""
    save(tmp_path, "one", [], meta={})
    path = tmp_path / "one" / "manifest.json"
    document = json.loads(path.read_text())
    document.update(version=1, meta={"__zoo__": ["tuple", []], "note": [1]})
    path.write_text(json.dumps(document))
    assert load(tmp_path).meta == {"__zoo__": ["tuple", []], "note": [1]}


@pytest.mark.parametrize("number", [True, np.float64(1.0), "1", None, torch.tensor(1)])
def test_scalars_are_plain_numbers(tmp_path: Path, number: Any) -> None:
    with pytest.raises(CheckpointError, match=r"the number 'x' is .*; an int or a float"):
        save(tmp_path, "one", [], {"x": number})


def test_ranks_that_give_the_same_nan_agree(tmp_path: Path) -> None:
    from zoo import sim
    from zoo.comm import Communicator

    sim.run(2, lambda rank: save(tmp_path, "one", [], {"x": float("nan")}, comm=Communicator()))
    assert math.isnan(load(tmp_path).scalars["x"])
