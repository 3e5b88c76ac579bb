"""A third of a matrix is always run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.matrices import rest


def _items(number: int, marked: bool) -> list[Any]:
    marker = SimpleNamespace() if marked else None
    return [
        SimpleNamespace(
            nodeid=f"a.py::test_{marked}[{i}]", name=f"test_{marked}[{i}]", get_closest_marker=lambda name: marker
        )
        for i in range(number)
    ]


def test_a_third_of_each_matrix_stays_and_all_of_others() -> None:
    for number in (1, 2, 3, 4, 10, 50):
        items = _items(number, True) + _items(7, False)
        left = rest(items)
        assert number - len(left) == -(-number // 3)
        assert all("True" in item.name for item in left)
        assert {id(item) for item in left} == {id(item) for item in rest(items[::-1])}
