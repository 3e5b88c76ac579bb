"""Every barrier and every mask of the kernels for CUDA is taken away and weakened in turn, and some check notices.

``make mutants-cuda`` tries all of them in all orders and writes a page; ``make test-slow`` tries a few.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import pytest
from tests import profiles
from tests.kernels import emulator
from tests.kernels.emulator import trials
from tests.kernels.emulator.places import Place, places

from zoo.kernels import loading

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")

SHARE = 8
"""How many of them ``make test-slow`` tries: those whose names have the smallest checksums."""
CHANGES = {emulator.TAKEN_AWAY: "taken away", emulator.OF_WARP: "of the warp", emulator.WITHOUT_LANE: "without a lane"}
ORDERS = ("rising", "falling", "of a block", "of an interval", "ahead", "mixed")


def named(place: Place, mutant: emulator.Mutant) -> str:
    return f"{place.file}:{place.line} {place.name} {CHANGES[mutant.change]}"


def parameters() -> list[Any]:
    """All mutants, by name; a drawn few are slow tests, the others are for campaigns."""
    all_of_them = {}
    for place, mutant in trials.mutants():
        name = named(place, mutant)
        all_of_them[name if name not in all_of_them else f"{name}, the second"] = (place, mutant)
    few = sorted(all_of_them, key=lambda name: zlib.crc32(name.encode()))[:SHARE]
    return [
        pytest.param(mutant, name, id=name, marks=pytest.mark.slow if name in few else pytest.mark.campaign)
        for name, (_, mutant) in all_of_them.items()
    ]


@pytest.mark.parametrize(("mutant", "name"), parameters())
def test_a_barrier_or_mask_that_is_missing_is_noticed(mutant: emulator.Mutant, name: str, record_property: Any) -> None:
    cases = trials.reached().get(mutant.place, [])
    assert cases, f"no check comes to {name}; add a case to benchmarks.gpu"
    by = {}
    for order, called in zip(emulator.ORDERS, ORDERS, strict=True):
        began = time.monotonic()
        if found := trials.attempt(mutant, order, cases).by:
            by[called] = found
            record_property("drawn", (name, called, time.monotonic() - began))
        if by and profiles.profile() != "campaign":
            break
    assert by, f"nothing notices that {name} is missing: add a case that does, or take the barrier out if none can"
    record_property("noticed by", next(iter(by.values())))


@pytest.mark.slow
def test_every_barrier_is_tried_and_without_a_change_nothing_is_noticed() -> None:
    tried = {mutant.place for _, mutant in trials.mutants()}
    assert tried == set(range(len(places())))
    nobody = emulator.Mutant(-1, emulator.TAKEN_AWAY)
    for order in emulator.ORDERS:
        assert trials.attempt(nobody, order, trials.reached()[0][:3]).by == ""
