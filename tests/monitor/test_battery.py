"""What every sink must do: its own reader finds exactly what was written, whatever happened in between."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import processes
from tests.engine.test_engine import BASE, data, net
from tests.monitor.battery import BATTERY, Entry, Row

from zoo import sim
from zoo.engine import initialize
from zoo.monitor import Feed, FolderSection
from zoo.parts import Environment, Sink, StepRecord
from zoo.registry import DEFAULT

FILES = [name for name in BATTERY if issubclass(DEFAULT.get("config_section", name), FolderSection)]
ALL = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            bool(entry.needs) and importlib.util.find_spec(entry.needs) is None,
            reason=f"{entry.needs} is not installed",
        ),
    )
    for name, entry in BATTERY.items()
]
CHEAP = [case for case in ALL if not BATTERY[str(case.values[0])].costly]
COSTLY = [case for case in ALL if BATTERY[str(case.values[0])].costly]
NUMBERS = st.floats(width=64) | st.sampled_from([0.1, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")])
METRICS = st.dictionaries(
    st.sampled_from(["user/accuracy", "moe/aux loss", "time/forward_s", "pld/theta"]), NUMBERS, max_size=3
)


@st.composite
def records(draw: Any, max_size: int = 6) -> list[StepRecord]:
    groups = draw(st.integers(1, 3))
    samples, found = draw(st.integers(0, 10**12)), []
    for step in range(1, draw(st.integers(1, max_size)) + 1):
        samples += draw(st.integers(1, 10**6))
        found.append(
            StepRecord(
                step=step, loss=draw(st.none() | NUMBERS), lr=tuple(draw(NUMBERS) for _ in range(groups)),
                grad_norm=draw(st.none() | NUMBERS), skipped=draw(st.booleans()), samples=8, total_samples=samples,
                tokens=draw(st.integers(0, 2**40)), step_s=draw(st.floats(0, 1e3)), metrics=draw(METRICS),
                memory_bytes=draw(st.none() | st.integers(0, 2**50)),
            )
        )  # fmt: skip
    return found


def plain(step: int, **more: Any) -> StepRecord:
    return StepRecord(step=step, loss=1 / step, lr=(0.1,), grad_norm=2.0, total_samples=8 * step, **more)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("WANDB_DIR", "COMET_OFFLINE_DIRECTORY"):
        monkeypatch.delenv(variable, raising=False)  # section_of sets them; here for the end of the test
    for variable, value in {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_CONSOLE": "off",
        "WANDB_DISABLE_CODE": "true", "WANDB_DISABLE_GIT": "true", "WANDB_X_DISABLE_STATS": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    yield
    wandb = sys.modules.get("wandb")
    if wandb is not None:
        wandb.teardown()


def build(name: str, place: Path, rank: int = 0, **options: Any) -> Sink:
    """A sink of rank ``rank`` that writes somewhere below ``place``."""
    section, environment = section_of(name, place, options), Environment(
        config=None, rank=rank, world_size=2, batch_rank=rank, batch_ranks=2
    )  # fmt: skip
    return DEFAULT.get("sink", name)(section, environment)  # type: ignore[no-any-return]


def section_of(name: str, place: Path, options: dict[str, Any]) -> Any:
    if name not in FILES:
        place.mkdir(exist_ok=True)
    os.environ["WANDB_DIR"] = str(place)
    os.environ["COMET_OFFLINE_DIRECTORY"] = str(place / "comet")
    folder = {"output_path": str(place), "job_name": "job"} if name in FILES else {}
    return DEFAULT.get("config_section", name)(enabled=True, **{**folder, **BATTERY[name].options, **options})


def place_of(name: str, place: Path) -> Path:
    return place / "job" if name in FILES else place


def by_name(rows: Sequence[Row]) -> dict[str, list[tuple[int, str]]]:
    """NaN equals NaN."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name, x, value in rows:
        found.setdefault(name, []).append((x, repr(value)))
    return found


def expected(entry: Entry, written: Sequence[StepRecord]) -> dict[str, list[tuple[int, str]]]:
    return by_name([row for record in written for row in entry.rows(record)])


def check_round_trip(name: str, written: list[StepRecord]) -> None:
    entry = BATTERY[name]
    with tempfile.TemporaryDirectory() as folder:
        sink = build(name, Path(folder))
        for record in written:
            sink.write(record)
        sink.close()
        assert by_name(entry.read(place_of(name, Path(folder)))) == expected(entry, written)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CHEAP)
@given(written=records())
def test_its_reader_finds_what_was_written(name: str, written: list[StepRecord]) -> None:
    check_round_trip(name, written)


A_FEW = [
    StepRecord(step=1, loss=None, lr=(0.0,), grad_norm=None, total_samples=8, samples=8, step_s=1.0),
    StepRecord(step=2, loss=2.5, lr=(0.1, 0.2), grad_norm=3.0, total_samples=16, samples=8, metrics={"a/b": 1.5}),
    StepRecord(step=5, loss=float("inf"), lr=(1e-30,), grad_norm=float("nan"), total_samples=40, skipped=True),
]


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("name", COSTLY)  # each run starts processes: no drawn records
@pytest.mark.parametrize("written", [A_FEW, A_FEW[1:2]])
def test_its_reader_finds_what_was_written_by_another_process(name: str, written: list[StepRecord]) -> None:
    check_round_trip(name, written)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ALL)
def test_through_the_engine_rank_0_writes_and_the_others_only_when_asked(name: str, tmp_path: Path) -> None:
    entry = BATTERY[name]

    def job(ranks: str) -> tuple[list[list[StepRecord]], list[list[str]]]:
        section = section_of(name, tmp_path / ranks, {"ranks": ranks}).model_dump()

        def rank_job(rank: int) -> tuple[list[StepRecord], list[str]]:
            engine = initialize({**BASE, name: section}, net(), training_data=data())[0]
            sinks, found = list(engine.feed._sinks), []
            for _ in range(2):
                engine.report("user/rank", rank)
                engine.train_batch()
                assert engine.record is not None
                found.append(engine.record)
            engine.destroy()
            assert engine.feed.failed == {}
            return found, sinks

        both = sim.run(2, rank_job)
        return [records for records, _ in both], [sinks for _, sinks in both]

    written, sinks = job("first")
    assert sinks == [[name], []]
    assert by_name(entry.read(place_of(name, tmp_path / "first"))) == expected(entry, written[0])
    if entry.costly:
        return
    written, sinks = job("all")
    assert sinks == [[name], [name]]
    for rank in range(2):
        place = place_of(name, tmp_path / "all") / f"rank_{rank}"
        assert by_name(entry.read(place)) == expected(entry, written[rank])


@pytest.mark.parametrize("name", FILES)
def test_a_resumed_run_goes_on_in_the_same_place(name: str, tmp_path: Path) -> None:
    entry = BATTERY[name]
    for steps in (range(1, 4), range(4, 7), range(7, 8)):
        sink = build(name, tmp_path)
        for step in steps:
            sink.write(plain(step))
        sink.close()
    found = by_name(entry.read(place_of(name, tmp_path)))
    assert found == expected(entry, [plain(step) for step in range(1, 8)])


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.monitor.test_battery import build, plain
sink = build(sys.argv[1], Path(sys.argv[2]))
for step in range(1, 31):
    sink.write(plain(step))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name, entry in BATTERY.items() if entry.streams])
def test_a_killed_process_loses_nothing_that_was_written(name: str, tmp_path: Path) -> None:
    entry = BATTERY[name]
    assert processes.run(KILLED, name, tmp_path).returncode == -9
    found = by_name(entry.read(place_of(name, tmp_path)))
    assert found == expected(entry, [plain(step) for step in range(1, 31)])


@pytest.mark.parametrize("name", FILES)
def test_a_place_that_cannot_be_written_is_told_when_the_sink_is_built(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    for place in (tmp_path / "file", Path("/proc/zoo"), Path("/dev/null")):
        with pytest.raises(ValueError, match=rf"^{name}: cannot write into {place}/job \(.*\); choose another .*\.$"):
            build(name, place)
    with pytest.raises(ValueError, match="give a folder of this machine's file system"):
        build(name, tmp_path, output_path="s3://bucket/x")
    for job_name in ("", "/", "..", "a/../../b"):
        with pytest.raises(ValueError, match="give the name of a folder inside output_path"):
            build(name, tmp_path, job_name=job_name)


FULL = """
import logging, resource, sys
from pathlib import Path
from tests.monitor.test_battery import build, plain
from zoo.monitor import Feed

name, place = sys.argv[1], Path(sys.argv[2])
class Keeps:
    steps = []
    def write(self, record): self.steps.append(record.step)
    def close(self): pass
logging.basicConfig(format="%(message)s", stream=sys.stdout)
feed = Feed({name: build(name, place), "keeps": Keeps()})
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for step in range(1, 201):
    feed.put(plain(step))
feed.close()
assert Keeps.steps == list(range(1, 201)), Keeps.steps
assert list(feed.failed) == [name]
try:
    build(name, place / "other")
except ValueError as error:
    print(error)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("name", FILES)
def test_when_the_disk_is_full_it_is_switched_off_once_and_what_is_there_can_be_read(name: str, tmp_path: Path) -> None:
    done = processes.run(FULL, name, tmp_path, check=True)
    first, second = done.stdout.splitlines()
    assert first == f"the monitor {name} failed in write() and is switched off: OSError: [Errno 27] File too large"
    assert second.startswith(f"{name}: cannot write into {tmp_path / 'other' / 'job'} (File too large); choose")
    sink = build(name, tmp_path)  # there is space again
    sink.write(plain(500))
    sink.close()
    entry = BATTERY[name]
    found, everything = by_name(entry.read(place_of(name, tmp_path))), expected(entry, [*map(plain, range(1, 201))])
    for event, rows in found.items():
        assert rows == [*everything[event][: len(rows) - 1], *expected(entry, [plain(500)])[event]]
    assert any(len(rows) > 5 for rows in found.values())


@pytest.mark.parametrize("name", [name for name, entry in BATTERY.items() if entry.needs])
def test_a_missing_package_is_told_when_the_engine_is_built(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = BATTERY[name].needs
    for module in [key for key in sys.modules if key.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    section = section_of(name, tmp_path, {}).model_dump()
    with pytest.raises(ValueError) as caught:
        initialize({**BASE, name: section}, net(), training_data=data())
    assert str(caught.value) == (
        f'{name}: the package {package} is not installed; `pip install "zoo-core[{name}]"` brings it, or set '
        f"{name}.enabled to false."
    )


@pytest.mark.matrix
@pytest.mark.parametrize("name", CHEAP)
def test_ten_thousand_records_take_seconds(name: str, tmp_path: Path) -> None:
    sink, begun = build(name, tmp_path), time.process_time()
    for record in itertools.islice(map(plain, itertools.count(1)), 10_000):
        sink.write(record)
    sink.close()
    assert time.process_time() - begun < 5


def test_the_feed_is_closed_at_the_end_of_a_script_that_does_not(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from tests.monitor.test_battery import build, plain
from zoo.monitor import Feed
feed = Feed({"jsonl_monitor": build("jsonl_monitor", Path(sys.argv[1]))})
for step in range(1, 301):
    feed.put(plain(step))
"""
    processes.run(program, tmp_path, check=True)
    assert len((tmp_path / "job" / "records.jsonl").read_text().splitlines()) == 300
    assert Feed  # what the program uses
