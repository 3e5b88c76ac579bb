"""Random numbers of counters: written down, so that they stay, and spread evenly."""

from __future__ import annotations

import math

from zoo.parts import drawn, uniform


def test_they_are_written_down() -> None:
    assert [round(uniform(7, step, 0, 1), 9) for step in range(3)] == [0.636854842, 0.421746525, 0.39723278]
    assert (drawn(0), drawn(3, 1, 2)) == (16294208416658607535, 6203391581663158234)


def test_order_and_number_of_counters_count() -> None:
    assert len({uniform(7, 1, 2), uniform(7, 2, 1), uniform(7, 1, 2, 0), uniform(8, 1, 2), uniform(7, 1)}) == 5


def test_they_are_even_along_each_counter() -> None:
    count = 4000
    for numbers in ([uniform(1, i) for i in range(count)], [uniform(1, 3, i, 2) for i in range(count)]):
        assert all(0 <= u < 1 for u in numbers)
        for tenth in range(10):
            share = sum(tenth <= 10 * u < tenth + 1 for u in numbers) / count
            assert abs(share - 0.1) < 5 * math.sqrt(0.09 / count)
