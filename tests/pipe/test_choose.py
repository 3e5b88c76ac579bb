"""Which schedule is taken, and what is said about it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.cost.stages import StageCosts, evenly
from zoo.pipe import ScheduleError, build
from zoo.pipe.choose import CANDIDATES, Candidate, choose
from zoo.pipe.simulate import simulate

MODEL = StageCosts(forward_s=4.0, input_s=4.0, weight_s=4.0, kept_bytes=80.0)


def test_the_fastest_that_fits_is_first_and_says_why() -> None:
    free = choose(4, 12, evenly(MODEL))
    assert free.best.candidate.name == "zb_v"
    # 12 micro-batches of 12 s on 4 ranks are 36 s; 3 slots of half a second are lost.
    assert free.why() == "zb_v: 37.5 s a batch, bubble 4.0%; dualpipe_v is as fast"
    # Four whole micro-batches of a fourth of the model each are 80 bytes; a rank that keeps fewer can only do 1F1B.
    tight = choose(4, 12, evenly(MODEL), limit_bytes=[80.0, 60.0, 40.0, 20.0])
    assert tight.best.candidate.name == "1f1b"
    assert tight.best.simulation is not None
    assert tight.best.simulation.peak_bytes == (80, 60, 40, 20)
    assert "zb_v would be faster, but rank 3 would keep 80 bytes, more than 20" in tight.why()
    assert str(tight).splitlines()[1].startswith("1f1b")
    assert str(tight).splitlines()[-1] == tight.why()
    assert str(free).splitlines()[0].split() == [
        "schedule",
        "stages",
        "time",
        "s",
        "bubble",
        "exposed",
        "s",
        "kept,",
        "most",
    ]


def test_schedules_that_are_not_for_these_sizes_come_last() -> None:
    found = choose(4, 4, evenly(MODEL))
    assert found.forecasts[-1].candidate.name == "dualpipe_v"
    assert found.forecasts[-1].simulation is None
    assert "two a rank" in str(found)


def test_when_nothing_fits() -> None:
    found = choose(2, 4, evenly(MODEL), limit_bytes=1.0)
    with pytest.raises(ScheduleError, match=r"no schedule can be taken \(.*1f1b: rank 0 would keep 80 bytes"):
        _ = found.best
    assert found.why() == "no schedule can be taken"


@given(
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 9),
    numbers=st.tuples(*[st.integers(1, 9)] * 4),
    limit=st.one_of(st.none(), st.integers(1, 300)),
)
def test_the_order_is_that_of_the_simulations(
    ranks: int, micro_batches: int, numbers: tuple[int, ...], limit: int | None
) -> None:
    forward, input_, weight, kept = map(float, numbers)
    costs = evenly(StageCosts(forward_s=forward, input_s=input_, weight_s=weight, kept_bytes=kept))
    found = choose(ranks, micro_batches, costs, limit_bytes=limit)
    assert sorted(map(str, CANDIDATES)) == sorted(str(f.candidate) for f in found.forecasts)
    keys = []
    for f in found.forecasts:
        time = math.inf
        if f.simulation is not None:
            table = build(f.candidate.name, ranks, micro_batches, **f.candidate.options)
            again = simulate(table, costs(table.num_stages))
            time = float(f"{again.makespan_s:.9g}")  # equal but for rounding: in the order of the candidates
            assert again.makespan_s == f.simulation.makespan_s
            assert bool(f.refused) == (limit is not None and max(again.peak_bytes) > limit)
        keys.append((bool(f.refused), time))
    assert keys == sorted(keys)


def test_what_does_not_train_is_not_taken() -> None:
    found = choose(2, 4, evenly(MODEL), candidates=[Candidate("inference"), Candidate("1f1b")])
    assert found.best.candidate.name == "1f1b"
    assert "forwards only" in found.forecasts[1].refused


def test_limits_of_some_ranks_only() -> None:
    assert choose(2, 4, evenly(MODEL), limit_bytes=[None, None]).limit_bytes is None
    found = choose(2, 4, evenly(MODEL), limit_bytes=[None, 40.0])
    assert found.limit_bytes == 40.0
    assert found.best.candidate.name == "1f1b"


def test_costs_of_stages_add_up_to_those_of_the_model() -> None:
    model = StageCosts(forward_s=3.0, input_s=1.0, weight_s=2.0, kept_bytes=12.0, activation_bytes=5.0, latency_s=0.25)
    four = evenly(model)(4)
    assert (four.forward_s, four.input_s, four.weight_s, four.kept_bytes) == (0.75, 0.25, 0.5, 3.0)
    assert (four.activation_bytes, four.latency_s, four.backward_s) == (5.0, 0.25, None)
    assert evenly(StageCosts(backward_s=2.0))(4).backward_s == 0.5


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: choose(2, 2, evenly(MODEL), candidates=()), "no candidates"),
        (lambda: choose(2, 2, evenly(MODEL), limit_bytes=[1.0]), "1 limits for 2 ranks"),
        (lambda: evenly(StageCosts(forward_s=[1.0])), "of the whole model"),
        (lambda: choose(2, 2, evenly(MODEL), candidates=[Candidate("1f2b")]), "1f1b"),
        (lambda: choose(2, 2, evenly(MODEL), limit_bytes=math.nan), "limit_bytes=nan; a limit is a number"),
        (lambda: choose(2, 2, evenly(MODEL), limit_bytes=[1.0, -1.0]), "at least 0, or None"),
        (lambda: choose(0, 2, evenly(MODEL)), "one or more of both"),
        (
            lambda: choose(2, 2, evenly(MODEL), candidates=[Candidate("dualpipe_v")]).best,
            r"more \(zb_v takes fewer\)\)\.$",
        ),
        (lambda: choose(2, 2, evenly(MODEL), limit_bytes=0).best, "allow more memory"),
        (lambda: StageCosts(forward_s=math.nan), "costs got forward_s=nan; a cost is a finite number"),
        (lambda: StageCosts(kept_bytes=[1.0, -2.0]), r"costs got kept_bytes=\[1.0, -2.0\]"),
        (lambda: StageCosts(weight_s=None), "costs got weight_s=None"),  # type: ignore[arg-type]
        (lambda: StageCosts(input_s="1"), "costs got input_s=1"),
    ],
)
def test_mistakes_are_told(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
