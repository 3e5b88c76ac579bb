"""zoo bench comm: the line, the order, the table, agreement between ranks, and how a failing rank ends it."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from tests import processes
from typer.testing import CliRunner

from zoo.cli import app
from zoo.cli.bench import ranks
from zoo.cli.bench.collectives import (
    OPERATION,
    OPERATIONS,
    Measured,
    Point,
    Settings,
    measure,
    order,
    sizes_between,
)
from zoo.cli.bench.fitting import Line, fit
from zoo.cli.bench.ranks import RanksError, measure_here, run_ranks
from zoo.cli.bench.results import check_writable, write_json
from zoo.cost.collectives import WIRE_FACTOR

SIZES = st.lists(st.integers(1, 1 << 30), min_size=2, max_size=12, unique=True)


def zoo(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


# -- the line ---------------------------------------------------------------------------------------------------------


@given(SIZES, st.floats(1e-7, 1e-1), st.floats(1e6, 1e12))
def test_a_line_comes_back_from_its_own_times(sizes: list[int], alpha: float, rate: float) -> None:
    found = fit(sizes, [alpha + size / rate for size in sizes])
    assert found.error < 1e-9
    for size in sizes:
        assert found.seconds(size) == pytest.approx(alpha + size / rate, rel=1e-9)
    grows = (max(sizes) - min(sizes)) / rate  # a number can be had as far as times depend on it
    if grows > 1e-4 * alpha:
        assert found.bytes_per_s == pytest.approx(rate, rel=1e-6)
    if alpha > 1e-4 * max(sizes) / rate:
        assert found.alpha_s == pytest.approx(alpha, rel=1e-6)


@given(SIZES, st.data())
def test_it_is_never_negative_and_no_other_line_is_nearer(sizes: list[int], data: st.DataObject) -> None:
    times = [data.draw(st.floats(1e-6, 10.0)) for _ in sizes]
    found = fit(sizes, times)
    assert found.alpha_s >= 0
    assert found.bytes_per_s > 0

    def distance(line: Line) -> float:
        return sum((line.seconds(size) / t - 1) ** 2 for size, t in zip(sizes, times, strict=True))

    best = distance(found)
    for alpha, slope in ((1.001, 1.0), (0.999, 1.0), (1.0, 1.001), (1.0, 0.999)):
        other = Line(alpha_s=found.alpha_s * alpha, bytes_per_s=found.bytes_per_s / slope, error=0.0)
        assert best <= distance(other) * (1 + 1e-9) + 1e-12


def test_noise_moves_it_little() -> None:
    sizes = [1 << k for k in range(10, 27)]
    wobble = [1 + 0.02 * (-1) ** k for k in range(len(sizes))]
    found = fit(sizes, [(2e-5 + size / 3e9) * w for size, w in zip(sizes, wobble, strict=True)])
    assert found.alpha_s == pytest.approx(2e-5, rel=0.03)
    assert found.bytes_per_s == pytest.approx(3e9, rel=0.03)
    assert found.error == pytest.approx(0.02, rel=0.1)


def test_times_that_do_not_grow_and_what_is_no_line() -> None:
    flat = fit([1, 10, 100], [2.0, 2.0, 2.0])
    assert (flat.alpha_s, flat.bytes_per_s) == (pytest.approx(2.0), math.inf)
    assert Line.from_dict(json.loads(json.dumps(flat.to_dict()))) == flat
    with pytest.raises(ValueError, match=r"two different sizes; given are 2 times of the sizes \[8\]"):
        fit([8, 8], [1.0, 2.0])
    with pytest.raises(ValueError, match="times are to be above 0"):
        fit([8, 9], [1.0, 0.0])


# -- settings and results ---------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20), st.integers(2, 9))
def test_sizes_go_from_the_first_to_the_last(least: int, more: int, factor: int) -> None:
    found = sizes_between(least, least + more, factor)
    assert (found[0], found[-1]) == (least, least + more)
    assert list(found) == sorted(set(found))
    assert all(b <= factor * a for a, b in itertools.pairwise(found))


@given(st.sets(st.integers(1, 10**6), min_size=1, max_size=20))
def test_every_point_is_measured_once_and_the_ends_come_first(sizes: set[int]) -> None:
    settings = Settings(sizes=tuple(sizes))
    points = list(order(settings))
    assert sorted(points) == sorted((name, size) for name in OPERATIONS for size in sizes)
    assert {size for _, size in points[: 2 * len(OPERATIONS)]} <= {min(sizes), max(sizes)}


def test_settings_that_are_none() -> None:
    for wrong, words in (
        ({"operations": ("gather",)}, "operation = 'gather'; allowed are all_gather"),
        ({"operations": ()}, "nothing to measure"),
        ({"device": "tpu"}, "device = 'tpu'; allowed are auto, cpu, cuda"),
        ({"dtype": "int8"}, "dtype = 'int8'; allowed are float32"),
        ({"sizes": (0,)}, "sizes of at least 1 byte"),
        ({"seconds": 0.0}, "seconds = 0.0; give a number above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            Settings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sizes from 4 to 2 by 4"):
        sizes_between(4, 2)
    settings = Settings(sizes=(1, 2), shared_memory=True)
    assert Settings.from_json(settings.to_json()) == settings


def point(operation: str, size: int, wire: int, seconds: float) -> Point:
    return Point(
        operation=operation, message_bytes=size, wire_bytes=wire, repetitions=5, median_s=seconds,
        lowest_s=seconds / 2, highest_s=seconds * 2,
    )  # fmt: skip


def measured(*points: Point, **more: Any) -> Measured:
    return Measured(ranks=4, nodes=2, backend="gloo", device="cpu", dtype="float32", seconds=1.5, points=points, **more)


POINTS = st.builds(
    point,
    st.sampled_from(OPERATIONS),
    st.integers(1, 1 << 40),
    st.integers(1, 1 << 40),
    st.floats(1e-9, 1e3),
)


@given(st.lists(POINTS, max_size=8), st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 99)), max_size=3))
def test_results_come_back_from_json(points: list[Point], skipped: list[tuple[str, int]]) -> None:
    found = measured(*points, skipped=tuple(skipped))
    assert Measured.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found


def test_what_is_no_result() -> None:
    with pytest.raises(ValueError, match="format = None; this reads 'zoo bench comm 1'"):
        Measured.from_dict({})
    with pytest.raises(ValueError, match="this is no result of zoo bench comm: 'points'"):
        Measured.from_dict({"format": "zoo bench comm 1"})
    whole = measured(point("send", 64, 64, 1e-5)).to_dict()
    odd = [{**whole["points"][0], "median_s": value} for value in (0, "1", None, float("nan"))]
    for changes in ({"nodes": "1"}, {"skipped": [["send"]]}, *({"points": [one]} for one in odd)):
        with pytest.raises(ValueError, match="this is no result of zoo bench comm: "):
            Measured.from_dict({**whole, **changes})


def test_the_table_has_bandwidths_and_lines() -> None:
    found = measured(
        point("all_reduce", 1000, 1500, 1e-3), point("all_reduce", 1_000_000, 1_500_000, 3e-3),
        point("send", 64, 64, 1e-5), skipped=(("send", 4096),),
    )  # fmt: skip
    lines = found.table().splitlines()
    assert lines[0] == "4 ranks on 2 nodes, gloo, cpu, float32, 1.5 s"
    assert lines[3].split() == ["all_reduce", "1000000", "5", "3000.0", "1500.0-6000.0", "0.333", "0.500"]
    assert lines[7].split() == ["all_reduce", "998.0", "0.749", "0.0%"]
    assert lines[-1].endswith("send of 4096 bytes")
    assert not [line for line in lines[6:] if line.startswith("send")], "one size is no line"


def test_a_result_is_written_whole_and_where_it_cannot_be_that_is_known_before(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    check_writable(path)
    assert not any(tmp_path.iterdir())
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["found.json"]
    assert json.loads(path.read_text()) == {"a": 1}
    for wrong, words in (
        (tmp_path, "is a folder; give the name of a file in it"),
        (tmp_path / "no" / "found.json", "No such file or directory"),
        (path / "found.json", "Not a directory"),
    ):
        with pytest.raises(ValueError, match=words):
            check_writable(wrong)


# -- ranks that are started -------------------------------------------------------------------------------------------


def program(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import os, sys, time\nrank = os.environ['RANK']\n{text}"]


def test_a_rank_that_fails_ends_all_with_its_reason() -> None:
    begun = time.monotonic()
    waits = program("time.sleep(100)")
    fails = program("print('noise'); sys.exit('zoo: rank 1: the device is on fire')")
    with pytest.raises(RanksError, match=r"^rank 1: the device is on fire$"):
        run_ranks([waits, fails, waits], timeout_s=60)
    with pytest.raises(RanksError, match=r"^rank 0: it ended with status -9 and said nothing$"):
        run_ranks([program("os.kill(os.getpid(), 9)"), waits], timeout_s=60)
    with pytest.raises(RanksError, match="2 ranks have not ended in 0 s"):
        run_ranks([waits, waits], timeout_s=0.2)
    assert time.monotonic() - begun < 30


def test_a_rank_that_lost_a_peer_is_not_the_one_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ranks._failed
    monkeypatch.setattr(ranks, "_failed", lambda started, end: after_all(real, started, end))
    lost = program("sys.exit('zoo: rank 0: RankFailedError: rank 1 failed: MemoryError')")
    fails = program("sys.exit('zoo: rank 1: MemoryError: no room')")
    for commands, words in (
        ([lost, fails], "^rank 1: MemoryError: no room$"),
        ([lost, program("")], "^rank 0: RankFailedError: rank 1 failed"),
    ):
        with pytest.raises(RanksError, match=words):
            run_ranks(commands, timeout_s=60)


def after_all(real: Any, started: Any, end: float) -> Any:
    """Look when all have ended: two that fail at one time."""
    for process in started:
        process.wait(30)
    return real(started, end)


def test_ranks_have_the_variables_of_torchrun(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    text = f"open({str(tmp_path)!r} + '/' + rank, 'w').write(' '.join(os.environ[name] for name in {names}))"
    run_ranks([program(text)] * 2, timeout_s=60)
    assert [(tmp_path / name).read_text() for name in "01"] == ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1"]


def test_a_number_of_ranks_that_is_none() -> None:
    for wrong in (-1, 0, 1, 65):
        with pytest.raises(ValueError, match="allowed are 2 to 64"):
            measure_here(wrong, Settings())


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[int, Settings]] = []

    def fake(number: int, settings: Settings) -> Measured:
        asked.append((number, settings))
        return measured(point("send", 64, 64, 1e-5))

    monkeypatch.setattr(ranks, "measure_here", fake)
    path = tmp_path / "comm.json"
    result = zoo(
        "bench", "comm", "--op", "send", "--min-size", "64", "--max-size", "1K", "--seconds", 3, "--json", path
    )
    assert result.exit_code == 0, result.output
    assert asked == [(2, Settings(operations=("send",), sizes=(64, 256, 1024), seconds=3.0))]
    assert "send" in result.output
    assert Measured.from_dict(json.loads(path.read_text())) == measured(point("send", 64, 64, 1e-5))


def test_what_the_command_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for wrong, words in (
        (["--device", "tpu"], "device = 'tpu'; allowed are auto, cpu, cuda."),
        (["--op", "scan"], "operation = 'scan'"),
        (["--min-size", "1X"], "'1X' is no size"),
        (["--device", "cuda"], "device = 'cuda', and torch sees no GPU here; give --device cpu"),
        (["--ranks", "1"], "ranks = 1; allowed are 2 to 64"),
        (["--json", str(tmp_path / "no" / "x.json")], "No such file or directory; give a file in a folder"),
    ):
        result = zoo("bench", "comm", *wrong)
        assert (result.exit_code, words in result.output) == (2, True), result.output
        assert "Traceback" not in result.output


# -- over real ranks --------------------------------------------------------------------------------------------------


def _measure(rank: int, seconds: float, slow_s: float) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    from zoo.comm import Communicator

    def clock() -> float:
        # A clock that goes on by itself on rank 1: what depends on a rank's own time would differ.
        return time.perf_counter() * (1 + rank * slow_s)

    told: list[tuple[str, int]] = []
    settings = Settings(sizes=(64, 4096), seconds=seconds)
    found = measure(Communicator(), settings, say=lambda name, size: told.append((name, size)), clock=clock)
    return found.to_dict(), told


@pytest.mark.slow
def test_all_ranks_have_one_result(tmp_path: Path) -> None:
    for world in (2, 3):
        found = processes.run_ranks(world, _measure, 3.0, 0.5)
        assert found[0] == found[1] == found[world - 1]
        result, told = Measured.from_dict(found[0][0]), found[0][1]
        assert sorted(told) == sorted((name, size) for name in OPERATIONS for size in (64, 4096))
        assert result.skipped == ()
        for p in result.points:
            assert p.message_bytes >= 64
            assert p.message_bytes % (4 * world) == 0
            assert p.wire_bytes == round(p.message_bytes * WIRE_FACTOR[p.operation](world))
            assert 0 < p.lowest_s <= p.median_s <= p.highest_s
            assert p.repetitions >= 3
        assert set(result.lines()) == set(OPERATIONS) == set(OPERATION)


@pytest.mark.slow
def test_it_ends_when_its_time_is_over() -> None:
    found = processes.run_ranks(2, _measure, 1e-6, 0.0)
    result = Measured.from_dict(found[0][0])
    assert result.points == ()
    assert len(result.skipped) == 2 * len(OPERATIONS)


def _fail(rank: int) -> str:
    from zoo.comm import Communicator, RankFailedError

    comm = Communicator()

    def say(operation: str, size: int) -> None:
        if rank == 1 and operation == "all_reduce":
            raise MemoryError("no room for the buffer")

    try:
        measure(comm, Settings(sizes=(64,), seconds=30.0), say=say)
    except MemoryError as error:
        comm.report_failure(error)
        return "failed"
    except RankFailedError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.slow
def test_the_others_hear_which_rank_failed_and_why() -> None:
    found = processes.run_ranks(2, _fail, group_timeout_s=10)
    assert found[1] == "failed"
    assert "no room for the buffer" in found[0]
    assert "rank 1" in found[0]


@pytest.mark.slow
def test_a_real_rank_that_fails_alone_ends_the_measurement(tmp_path: Path) -> None:
    fine = Settings(sizes=(64,), seconds=2.0, device="cpu").to_json()
    wrong = fine.replace('"cpu"', '"abacus"')
    commands = [
        [sys.executable, "-m", "zoo.cli.bench.on_a_rank", settings, str(tmp_path / "found.json")]
        for settings in (fine, wrong)
    ]
    with pytest.raises(RanksError, match=r"^rank 1: device = 'abacus'; allowed are auto, cpu, cuda\.$"):
        run_ranks(commands, timeout_s=120)
    assert not (tmp_path / "found.json").exists()


@pytest.mark.slow
def test_the_command_on_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "comm.json"
    options = ["--max-size", "16K", "--seconds", "2", "--json", str(path), "--device", "cpu"]
    result = zoo("bench", "comm", *options)
    assert result.exit_code == 0, result.output
    found = Measured.from_dict(json.loads(path.read_text()))
    assert (found.ranks, found.backend, found.device) == (2, "gloo", "cpu")
    assert {p.operation for p in found.points} == set(OPERATIONS)
    assert all(line.alpha_s >= 0 and line.bytes_per_s > 0 for line in found.lines().values())
    shared = zoo("bench", "comm", "--shared-memory", "--op", "all_gather", "--max-size", "4K", "--seconds", "1")
    assert "gloo with shared memory" in shared.output
