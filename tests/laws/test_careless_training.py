"""Law 8 by every door: programs that train in careless ways, by zoo.zero, the engine or the façade, compute what plain
torch computes, or are refused by a sentence on every rank."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.shard import memory

from .door_programs import Job, Use, programs, run_program
from .doors import jobs

drawn = jobs().flatmap(lambda job: st.tuples(st.just(job), programs(job), st.booleans()))


@pytest.mark.dear
@pytest.mark.hypothesis
def test_careless_training(record_property: Callable[[str, object], None]) -> None:
    counts: Counter[str] = Counter()

    @examples(times=4, quick=2.67)
    @given(drawn)
    def check(given: tuple[Job, list[Use], bool]) -> None:
        job, program, large = given
        # As if each gradient were a large table's, which takes memory when it arrives.
        pooled = 0 if large else memory.POOLED_BYTES
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(memory, "POOLED_BYTES", pooled):
            counts.update(run_program(job, program, Path(folder)))

    check()
    share = counts["refused"] / counts["uses"]
    record_property("programs", counts["programs"])
    record_property("refused", f"{share:.1%} of {counts['uses']} uses")
    print(f"{counts['programs']} programs, {counts['uses']} uses, refused: {share:.1%}")
    assert share < 0.3
