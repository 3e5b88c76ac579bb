"""A third of a matrix is always run, and each dear test in one of six commits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.matrices import TESTS, is_whole, not_drawn, rest


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


def test_each_dear_test_has_its_turn_and_a_commit_always_the_same() -> None:
    items = _items(60, "dear") + _items(7) + _items(9, "dear", "slow")
    turns = [{id(item) for item in not_drawn(items, f"{number:040x}")} for number in range(60)]
    assert turns == [{id(item) for item in not_drawn(items[::-1], f"{number:040x}")} for number in range(60)]
    dear = {id(item) for item in items[:60]}
    assert all(turn < dear for turn in turns)
    assert not set.intersection(*turns), "a test has no turn in 60 commits"
    assert 0.1 < sum(len(dear - turn) for turn in turns) / 3600 < 0.25


def test_files_that_are_named_run_whole() -> None:
    assert is_whole([])
    assert is_whole([str(TESTS)])
    assert not is_whole([str(TESTS / "zero")])
    assert not is_whole([str(TESTS), str(TESTS / "zero" / "test_x.py")])
    assert not is_whole([f"{TESTS / 'test_matrices.py'}::test_files_that_are_named_run_whole"])
