"""A third of a matrix is always run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.matrices import rest


def _items(number: int, *markers: str) -> list[Any]:
    def closest(name: str) -> Any:
        return name if name in markers else None

    what = "_".join(("test", *markers))
    return [
        SimpleNamespace(nodeid=f"a.py::{what}[{i}]", name=f"{what}[{i}]", get_closest_marker=closest)
        for i in range(number)
    ]


def test_a_third_of_each_matrix_stays_and_all_of_others() -> None:
    for number in (1, 2, 3, 4, 10, 50):
        items = _items(number, "matrix") + _items(7) + _items(9, "matrix", "slow")
        left = rest(items)
        assert number - len(left) == -(-number // 3)
        assert all(item.name.startswith("test_matrix[") for item in left)
        assert {id(item) for item in left} == {id(item) for item in rest(items[::-1])}
