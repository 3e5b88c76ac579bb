"""Topologies: the documented examples, and that they are the row-major mixed-radix numbers that they claim to be."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.layout import Mesh
from zoo.pipe import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

dims = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def of(sizes: list[int]) -> ProcessTopology:
    return ProcessTopology(axes=["pipe", "data", "model", "expert"][: len(sizes)], dims=sizes)


def test_documented_examples() -> None:
    x = ProcessTopology(axes=["x", "y"], dims=[2, 3])
    assert x.get_rank(x=0, y=1) == 1
    assert x.get_dim("y") == 3
    assert x.get_coord(rank=1).x == 0
    assert x.get_coord(rank=1).y == 1
    assert x.get_axis_list(axis="x", idx=0) == [0, 1, 2]
    assert x.get_axis_list(axis="y", idx=0) == [0, 3]
    ab = ProcessTopology(axes=["a", "b"], dims=[2, 2])
    assert ab.get_rank_repr(rank=3) == "a_01-b_01"
    assert ab.get_rank_repr(rank=3, omit_axes=["a"]) == "b_01"
    assert ab.get_rank_repr(rank=2, inner_sep="=", outer_sep="/") == "a=01/b=00"
    three = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
    assert three.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert three.filter_match(pipe=0, data=1) == [2, 3]
    assert [str(three.get_coord(rank)) for rank in three.filter_match(pipe=0, data=1)] == [
        "ProcessCoord(pipe=0, data=1, model=0)",
        "ProcessCoord(pipe=0, data=1, model=1)",
    ]
    assert three.get_axis_names() == ["pipe", "data", "model"]
    assert three.world_size() == 8


def test_what_a_topology_does_not_have() -> None:
    x = ProcessTopology(axes=["x"], dims=[2])
    assert x.get_dim("y") == 0
    assert x.get_axis_comm_lists("y") == []


def test_names_of_axes_are_names_and_nothing_else() -> None:
    odd = ProcessTopology(axes=["self", "count", "axis"], dims=[2, numpy.int64(2), 3])
    assert odd.get_rank(self=1, count=0, axis=2) == 8
    assert odd.filter_match(self=1, count=0) == odd.get_axis_list("self", 1)[:3] == [6, 7, 8]
    assert odd.get_rank_repr(8, omit_axes="count") == "self_01-axis_02"
    letters = ProcessTopology(axes=["data", "a", "at"], dims=[2, 2, 2])
    assert letters.get_rank_repr(7, omit_axes="data") == "a_01-at_01"  # one name, not the letters in it


@pytest.mark.parametrize(
    ("topology", "axes"),
    [
        (PipeDataParallelTopology(3, 2), {"pipe": 3, "data": 2}),
        (PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=4), {"pipe": 2, "data": 4, "model": 3}),
    ],
)
def test_named_topologies(topology: ProcessTopology, axes: dict[str, int]) -> None:
    assert topology.mesh_axes == axes
    assert list(topology.mesh_axes) == list(axes)
    assert topology.get_rank_repr(topology.world_size() - 1) == ("model_02" if "model" in axes else "")


@examples(times=4)
@given(dims)
def test_ranks_and_coordinates_are_those_of_a_row_major_mesh(sizes: list[int]) -> None:
    topology = of(sizes)
    mesh = Mesh(tuple(topology.mesh_axes), tuple(topology.mesh_axes.values()))
    assert topology.world_size() == math.prod(sizes)
    for rank in range(topology.world_size()):
        coord = topology.get_coord(rank)
        assert tuple(coord) == mesh.coordinates(rank)
        assert topology.get_rank(**coord._asdict()) == rank


@examples(times=4)
@given(dims)
def test_groups_of_an_axis_partition_the_ranks_and_differ_in_it_alone(sizes: list[int]) -> None:
    topology = of(sizes)
    for axis in topology.get_axis_names():
        groups = topology.get_axis_comm_lists(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size()))
        for group in groups:
            coords = [topology.get_coord(rank)._asdict() for rank in group]
            assert [coord.pop(axis) for coord in coords] == list(range(topology.get_dim(axis)))
            assert all(coord == coords[0] for coord in coords)
            assert topology.filter_match(**coords[0]) == group


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ProcessTopology(["a", "a"], [2, 2]), "one size for each distinct axis"),
        (lambda: ProcessTopology(["a"], [2, 2]), "one size for each distinct axis"),
        (lambda: ProcessTopology([], []), "one size for each distinct axis"),
        (lambda: ProcessTopology(["a"], [0]), "1 or more"),
        (lambda: ProcessTopology(["_a"], [1]), "letters, digits"),
        (lambda: ProcessTopology(["class"], [1]), "no keyword of Python"),
        (lambda: ProcessTopology([1], [1]), "the axis 1; a name is"),  # type: ignore[list-item]
        (lambda: ProcessTopology(["a"], [True]), "1 or more"),
        (lambda: of([2, 3]).get_coord("1"), "rank '1' is not"),  # type: ignore[arg-type]
        (lambda: of([2, 3]).get_rank(pipe=1), "one for each axis"),
        (lambda: of([2, 3]).get_rank(pipe=2, data=0), "nobody is at ProcessCoord"),
        (lambda: of([2, 3]).get_coord(6), "0 to 5"),
        (lambda: of([2, 3]).filter_match(model=1), "'model'"),
    ],
)
def test_mistakes_are_told(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
