"""Buckets, and the log that goes into them: what a slow reader with all of it in memory would say."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zoo.report import reading
from zoo.report.reading import Log, read_log, read_part
from zoo.report.series import Buckets

VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(math.inf))
RECORDS = st.lists(st.tuples(st.integers(1, 300), VALUES), max_size=60)


def slow(records: list[tuple[int, float | None]], width: int) -> dict[int, list[float]]:
    """By bucket the values that count."""
    kept: list[tuple[int, float | None]] = []
    for step, value in records:
        if kept and step <= kept[-1][0]:
            # Buckets that begin at the step or after it are void, and the bucket that it is in the middle of stays.
            first = -(-(step - 1) // width) * width + 1
            kept = [one for one in kept if one[0] < first]
        kept.append((step, value))
    found: dict[int, list[float]] = {}
    for step, value in kept:
        if value is not None and math.isfinite(value):
            found.setdefault((step - 1) // width, []).append(value)
    return found


def check(buckets: Buckets, expected: dict[int, list[float]]) -> None:
    parts = buckets.series.get("x")
    for place in range(buckets.most):
        values = expected.get(place, [])
        count = 0 if parts is None else parts["count"][place]
        assert count == len(values)
        if values and parts is not None:
            assert (parts["low"][place], parts["high"][place]) == (min(values), max(values))
            assert buckets.mean("x")[place] == pytest.approx(np.mean(values), abs=1e-6, rel=1e-9)


@given(RECORDS, st.sampled_from([2, 8, 400]), st.integers(1, 7))
def test_buckets_are_what_a_slow_reader_says(records: list[Any], most: int, piece: int) -> None:
    width = 1
    while width * most < max((step for step, _ in records), default=1):
        width *= 2
    buckets = Buckets(most, width)  # so wide from the beginning that nothing depends on when they doubled
    for at in range(0, len(records), piece):
        part = records[at : at + piece]
        values = np.array([np.nan if v is None else v for _, v in part], dtype=np.float64)
        buckets.add(np.array([s for s, _ in part], dtype=np.int64), {"x": values})
    check(buckets, slow(records, width))
    assert buckets.not_finite.get("x", 0) == sum(v == math.inf for _, v in records)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=300), st.sampled_from([2, 6, 64]))
def test_buckets_double_as_the_run_grows(values: list[float], most: int) -> None:
    buckets = Buckets(most)
    for step, value in enumerate(values, start=1):
        buckets.add(np.array([step]), {"x": np.array([value])})
    check(buckets, slow(list(enumerate(values, start=1)), buckets.width))
    assert buckets.size <= most
    assert buckets.num_steps == len(values)


def test_an_odd_number_of_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match="even number"):
        Buckets(3)


LINES = st.lists(
    st.one_of(
        st.builds(
            lambda step, loss, more: json.dumps({"step": step, "x": loss, **more}),
            st.integers(1, 2000), st.floats(-10, 10),
            st.sampled_from([{}, {"rss_bytes": [1, 2]}, {"lr": [0.5, 1.0]}, {"y": None}, {"lr": 0.5}]),
        ),
        st.sampled_from(["", "{", "[]", "null", '{"step": 0}', '{"step": "1"}', '{"step": true}', "ä", "}{" * 40]),
    ), max_size=40,
)  # fmt: skip


@given(LINES, st.integers(1, 9), st.sampled_from([16, 64, 1 << 20]), st.booleans())
@example(["[]"], 2, 16, False)  # the second part begins in the line that is cut
def test_parts_of_a_file_are_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], parts: int, chunk: int, ends: bool
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    path.write_bytes("\n".join(lines).encode() + (b"\n" if ends else b""))
    size = path.stat().st_size
    whole = read_part(path, 0, size, 2)
    edges = [size * i // parts for i in range(parts + 1)]
    before = reading.CHUNK
    reading.CHUNK = chunk
    try:
        found = Log(Buckets(reading.BUCKETS, 2))
        for begin, end in itertools.pairwise(edges):
            found.merge(read_part(path, begin, end, 2))
    finally:
        reading.CHUNK = before
    assert (found.broken, found.cut) == (whole.broken, whole.cut)
    assert found.buckets.last == whole.buckets.last
    assert found.buckets.series.keys() == whole.buckets.series.keys()
    for name, there in whole.buckets.series.items():
        for part, values in there.items():
            np.testing.assert_allclose(found.buckets.series[name][part], values, err_msg=f"{name} {part}")


def write(path: Path, count: int, **more: Any) -> Path:
    with open(path, "w") as file:
        for step in range(1, count + 1):
            loss = 50.0 if step == 3217 else 2.0 + (step % 7) / 100
            file.write(json.dumps({"step": step, "loss": loss, **more}) + "\n")
    return path


def test_one_step_among_many_stays_a_spike(tmp_path: Path) -> None:
    log = read_log(write(tmp_path / "log.jsonl", 20_000))
    buckets = log.buckets
    assert buckets.width > 1
    high = buckets.series["loss"]["high"]
    assert high[(3217 - 1) // buckets.width] == 50.0
    assert np.nanmax(np.delete(high, (3217 - 1) // buckets.width)) < 3


@pytest.mark.dear
def test_several_processes_read_what_one_does(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", 20_000, rss_bytes=[1, 2], note="not a number")
    one, three = read_log(path, processes=1), read_log(path, processes=3)
    assert one.buckets.num_steps == three.buckets.num_steps == 20_000
    for name, there in one.buckets.series.items():
        for part, values in there.items():
            np.testing.assert_allclose(three.buckets.series[name][part], values)


@pytest.mark.parametrize("tail", ['{"step": 11, "lo', "\0\0\0", '{"step": 11, "loss": 1.0}'])
def test_a_last_line_that_is_cut_is_no_error(tmp_path: Path, tail: str) -> None:
    path = write(tmp_path / "log.jsonl", 10)
    with open(path, "a") as file:
        file.write(tail)
    log = read_log(path)
    is_whole = tail.endswith("}")
    assert (log.broken, log.cut, log.buckets.last) == (0, not is_whole, 11 if is_whole else 10)


def test_what_is_no_record_is_counted_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK", 1 << 10)
    monkeypatch.setattr(reading, "LONGEST_LINE", 1 << 12)
    path = tmp_path / "log.jsonl"
    deep = "[" * 3000
    path.write_text(
        '{"step": 1, "loss": 1.0}\n' + "x" * 20_000 + "\n" + deep + '\n{"step": 2, "loss": "NaN"}\n'
        '{"step": 99999999999999999999, "loss": 1}\n{"step": 3, "loss": 1' + "0" * 400 + '}\n{"step": 4, "loss": 3.0}\n'
    )
    log = read_log(path)
    assert log.broken == 3
    assert log.buckets.last == 4
    assert log.buckets.series["loss"]["count"].sum() == 2


def test_names_of_a_file_do_not_grow_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": i, f"user/{i}": 1.0}) + "\n" for i in range(1, 201)))
    log = read_log(path)
    assert len(log.buckets.series) == reading.SERIES
    assert log.names_left_out == 200 - reading.SERIES


def test_an_empty_log_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("")
    log = read_log(tmp_path / "log.jsonl")
    assert (log.buckets.size, log.broken, log.cut) == (0, 0, False)
