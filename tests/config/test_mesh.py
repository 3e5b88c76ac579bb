"""The mesh section: sizes, which axes are for what, and the batch triangle on it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.config import ConfigError, load
from zoo.config.mesh import resolve

SIZES = st.dictionaries(
    st.sampled_from(["pipe", "data", "expert", "sequence", "tensor"]), st.integers(1, 4), min_size=1
)


@examples(times=5)
@given(SIZES, st.data())
def test_one_size_may_be_what_is_left(sizes: dict[str, int], data: st.DataObject) -> None:
    world = math.prod(sizes.values())
    assert resolve(sizes, world) == sizes
    open_one = data.draw(st.sampled_from(sorted(sizes)))
    assert resolve({**sizes, open_one: -1}, world) == sizes
    with pytest.raises(ValueError, match="is no mesh of"):
        resolve(sizes, world + 1)


@examples(times=5)
@given(SIZES)
def test_batches_are_divided_among_ranks_that_see_other_samples(sizes: dict[str, int]) -> None:
    world = math.prod(sizes.values())
    config = load({"train_micro_batch_size_per_gpu": 3, "mesh": {"axes": sizes}}, world_size=world)
    ranks = math.prod(size for name, size in sizes.items() if name in ("data", "expert"))
    assert (config.batch_ranks, config.world_size) == (ranks, world)
    assert config.train_batch_size == 3 * ranks
    assert config.mesh.layer_axes == (("pipe",) if "pipe" in sizes else ())
    assert set(config.mesh.data_axes) == set(sizes) - {"pipe", "tensor"}


def test_what_axes_are_for_may_be_said() -> None:
    section = {"axes": {"stage": 2, "a": 3, "b": 2}, "data": ["a", "b"], "layers": ["stage"], "batch": ["b"]}
    config = load({"train_micro_batch_size_per_gpu": 1, "mesh": section}, world_size=12)
    assert config.train_batch_size == 2
    assert (config.mesh.data_axes, config.mesh.layer_axes, config.mesh.batch_axes) == (("a", "b"), ("stage",), ("b",))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"axes": {"data": 3}}, "mesh.axes: data 3 is no mesh of 4 ranks; the product of the sizes must be that"),
        ({"axes": {"data": 0}}, "mesh.axes: data 0; sizes are positive, and one of them may be -1"),
        ({"axes": {"data": -1, "pipe": -1}}, "one of them may be -1"),
        ({"axes": {"data": -1}, "data": ["date"]}, "mesh.data: date: no such axis; mesh.axes has data"),
        ({"axes": {"data": 2, "pipe": 2}, "layers": ["data"]}, "mesh: data is in data and in layers"),
        ({"axes": {"data": 2, "tensor": 2}, "batch": ["tensor"]}, "mesh.batch: tensor is no data axis (data)"),
        ({"axes": {"data": 2, "b": 2}, "batch": ["data", "data"]}, "mesh.batch: data, data: name each axis once"),
        ({"axes": {"data": 2, "b": 2}, "data": ["b", "b"]}, "mesh.data: b, b: name each axis once"),
        ({"axes": {"data": "2"}}, "mesh.axes.data: given '2' (str); allowed: a valid integer"),
    ],
)
def test_mistakes_are_told(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"train_micro_batch_size_per_gpu": 1, "mesh": section}, world_size=4)
    assert said in str(caught.value)


def test_the_batch_error_shows_the_axes() -> None:
    with pytest.raises(ConfigError, match=r"world_size = 2 \(8 ranks, argument of load, along data of the mesh\)"):
        load({"train_batch_size": 3, "mesh": {"axes": {"data": 2, "tensor": 4}}}, world_size=8)
