"""What zoo bench hardware is made of: timing, products, memory, calls, copies, the disk."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zoo.io
from zoo.cli.bench import disk
from zoo.cli.bench.computing import SHAPES, call_cost, copies, memory_bandwidth, products
from zoo.cli.bench.disk import file_system, measure_disk
from zoo.cli.bench.timing import FEWEST, MOST, summary, time_call

CPU = torch.device("cpu")


class Clock:
    """A clock that goes on only when something says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.calls += 1
            self.now += seconds

        return call


@given(st.floats(1e-5, 10.0), st.floats(1e-3, 1.0))
def test_a_call_is_timed_as_what_it_takes_and_for_its_share(seconds: float, share: float) -> None:
    clock = Clock()
    found = time_call(clock.taking(seconds), CPU, share, clock)
    assert found.median_s == pytest.approx(seconds, rel=1e-6)
    assert found.lowest_s <= found.median_s <= found.highest_s
    assert found.repetitions >= FEWEST
    assert clock.calls == found.repetitions + 2, "one to warm up, one to guess"
    block = max(seconds, 4e-4 + seconds)
    assert clock.now - 2 * seconds <= max(share, (FEWEST - 1) * block) * (1 + 1e-6) + block
    assert found.repetitions * seconds <= MOST * block


class Event:
    """An event of a device whose clock is a test's."""

    clock = Clock()

    def __init__(self, enable_timing: bool) -> None:
        self.at = -1.0

    def record(self) -> None:
        self.at = self.clock()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


def test_a_gpu_is_timed_between_events_behind_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", waited.append, raising=False)
    found = time_call(Event.clock.taking(0.25), torch.device("cuda", 0), 0.01)
    assert found.median_s == found.lowest_s == found.highest_s == 0.25
    assert FEWEST < found.repetitions <= MOST
    assert sum(waited) == waited[0] // FEWEST * found.repetitions, "a wait for all that follows it"
    assert max(waited) <= 200 * waited[0] // FEWEST


def test_a_summary_is_the_median() -> None:
    found = summary([4.0, 1.0, 2.0], 2)
    assert (found.median_s, found.lowest_s, found.highest_s, found.repetitions) == (1.0, 0.5, 2.0, 6)


def test_products_that_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rate = Clock(), 1e10
    sizes: list[int] = []

    def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        clock.now += 2 * a.shape[0] * a.shape[1] * b.shape[1] / rate
        sizes.append(out.numel())

    monkeypatch.setattr(torch, "mm", mm)
    shapes = [(1 << k, 64, 64) for k in range(14, -1, -1)]
    found = list(products(CPU, torch.float32, 2e-2, shapes=shapes, clock=clock))
    assert [shape[0] for shape, _ in found] == [1 << k for k in range(len(found))], "the smallest first"
    assert 3 < len(found) < len(shapes)
    for (m, n, k), timing in found:
        assert 2 * m * n * k / timing.median_s == pytest.approx(rate, rel=1e-6)
    assert clock.now < 4e-2


def test_products_of_this_machine() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = list(products(CPU, dtype, 0.4, shapes=[(8, 16, 32), (1, 4, 4)]))
        assert [shape for shape, _ in found] == [(1, 4, 4), (8, 16, 32)]
        assert all(timing.lowest_s > 0 for _, timing in found)
    assert all(b >= a for a, b in itertools.pairwise(m * n * k for m, n, k in SHAPES))


def test_memory_and_calls_of_this_machine() -> None:
    rate, timing = memory_bandwidth(CPU, 0.01, num_bytes=1 << 20)
    assert rate == pytest.approx(2 * (1 << 20) / timing.median_s)
    assert 1e-8 < call_cost(CPU, 0.01).median_s < 1e-2


def test_copies_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="copies to cpu: that is the host's own memory"):
        copies(CPU, 0.1)


def test_a_disk_is_measured_past_the_page_cache_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        zoo.io.Handle(direct="always").write(torch.zeros(4096, dtype=torch.uint8), tmp_path / "probe")
    except zoo.io.UnavailableError:
        pytest.skip("the folder of the tests has no direct transfers")
    (tmp_path / "probe").unlink()
    found = measure_disk(tmp_path, 0.05, sizes=(1 << 16, 1 << 18))
    assert found.read.bytes_per_s > 0
    assert found.write.seconds(1 << 18) > 0
    assert found.backend in ("uring", "threads")
    assert not any(tmp_path.iterdir())
    real = zoo.io.Handle.stats

    def buffered(self: zoo.io.Handle) -> Any:
        return SimpleNamespace(buffered_bytes=real(self).direct_bytes)

    monkeypatch.setattr(zoo.io.Handle, "stats", buffered)
    with pytest.raises(ValueError, match="went through the page cache"):
        measure_disk(tmp_path, 0.01, sizes=(1 << 16, 1 << 18))


def test_a_folder_that_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be measured: .*give --folder with a folder on a local disk"):
        measure_disk(tmp_path / "nowhere", 0.1)
    if Path("/proc/self").is_dir():
        with pytest.raises(ValueError, match="/proc cannot be measured"):
            measure_disk(Path("/proc"), 0.1, sizes=(1 << 16, 1 << 18))


def test_memory_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    lines = [
        "21 1 254:0 / / rw shared:1 - ext4 /dev/vda rw",
        f"22 21 0:5 / {tmp_path} rw shared:2 master:1 - tmpfs tmpfs rw",
        f"23 22 0:6 / {tmp_path}/a\\040b rw - xfs /dev/vdb rw",
    ]
    mounts.write_text("\n".join(lines) + "\n")
    assert file_system(tmp_path / "a b" / "c", mounts) == "xfs"
    assert file_system(tmp_path / "other", mounts) == "tmpfs"
    assert file_system(Path("/usr"), mounts) == "ext4"
    assert file_system(Path("/usr"), tmp_path / "nowhere") == "unknown"
    monkeypatch.setattr(disk, "file_system", lambda _: "tmpfs")
    with pytest.raises(ValueError, match="is in memory \\(tmpfs\\)"):
        measure_disk(tmp_path, 0.1)
