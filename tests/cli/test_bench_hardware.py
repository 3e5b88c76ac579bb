"""zoo bench hardware: the file that it makes, what a link is made of, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from zoo.cli import app
from zoo.cli.bench import computing, disk, filling, ranks
from zoo.cli.bench.collectives import Measured, Point, Settings
from zoo.cli.bench.disk import Disk
from zoo.cli.bench.filling import Wanted, device_of, fill, link_of, summary
from zoo.cli.bench.fitting import Line
from zoo.cli.bench.timing import Timing
from zoo.cost import Device, Hardware, product_s, read_hardware, seconds, wire_bytes

STEPS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
TIMING = Timing(median_s=1e-3, lowest_s=1e-3, highest_s=1e-3, repetitions=3)


def zoo(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def ring(
    ranks: int, latency_s: float, rate: float, *, nodes: int = 1, sizes: tuple[int, ...] = (1 << 10, 1 << 20)
) -> Measured:
    """What zoo bench comm finds on ranks whose collectives are rings."""
    points = []
    for name, steps in STEPS.items():
        for size in sizes:
            wire, _, _ = wire_bytes(name, size, ranks, None)
            time_s = steps * (ranks - 1) * latency_s + wire / rate
            points.append(
                Point(
                    operation=name, message_bytes=size, wire_bytes=wire, repetitions=3, median_s=time_s,
                    lowest_s=time_s, highest_s=time_s,
                )
            )  # fmt: skip
    return Measured(
        ranks=ranks, nodes=nodes, backend="gloo", device="cpu", dtype="float32", seconds=1.0, points=tuple(points)
    )


# -- links ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6).map(lambda k: 2**k), st.floats(1e-7, 1e-3), st.floats(1e7, 1e12))
def test_a_ring_comes_back_as_its_link_and_is_forecast_as_it_was_measured(
    size: int, latency_s: float, rate: float
) -> None:
    measured = ring(size, latency_s, rate)
    link = link_of(measured)
    machine = Hardware(
        name="", device=Device(name="", flops_per_s={"fp32": 1.0}, memory_bytes=1, bytes_per_s=1.0),
        ranks_per_node=size, inside=link, between=link,
    )  # fmt: skip
    for point in measured.points:
        found = seconds(point.operation, point.message_bytes, size, machine, local=size)
        if point.operation == "all_reduce":
            assert found == pytest.approx(point.median_s)
            assert (point.message_bytes, point.median_s) in link.all_reduce[size]
    grows = (1 << 20) / rate
    if grows > 1e-3 * latency_s:
        assert link.bytes_per_s == pytest.approx(rate, rel=1e-3)
    if latency_s > 1e-3 * grows:
        assert link.latency_s == pytest.approx(latency_s, rel=1e-3)


def test_times_that_do_not_grow_have_the_rate_of_the_largest_message() -> None:
    link = link_of(ring(2, 1e-3, 1e30))
    assert link.bytes_per_s == pytest.approx((1 << 20) / 2e-3)
    assert link.latency_s == pytest.approx(1e-3)


def test_a_result_without_a_line_is_no_link() -> None:
    with pytest.raises(ValueError, match="a link needs one of all_gather, reduce_scatter, all_reduce at two sizes"):
        link_of(ring(2, 1e-3, 1e9, sizes=(64,)))


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts that take no time; the numbers of threads while products ran."""
    threads: list[int] = []

    def products(device: torch.device, dtype: torch.dtype, share: float, **_: Any) -> Any:
        threads.append(torch.get_num_threads())
        return iter([((8, 8, 8), TIMING), ((64, 64, 64), TIMING)])

    monkeypatch.setattr(computing, "products", products)
    monkeypatch.setattr(computing, "memory_bandwidth", lambda *_, **__: (1e10, TIMING))
    line = Line(alpha_s=1e-4, bytes_per_s=2e9, error=0.1)
    flat = Line(alpha_s=1e-4, bytes_per_s=math.inf, error=0.1)
    found = Disk(read=line, write=flat, backend="uring", file_system="ext4")
    monkeypatch.setattr(disk, "measure_disk", lambda *_, **__: found)
    asked: list[Settings] = []

    def measure_here(number: int, settings: Settings) -> Measured:
        asked.append(settings)
        return ring(number, 1e-5, 1e9)

    monkeypatch.setattr(ranks, "measure_here", measure_here)
    return threads


def test_a_file_that_forecasts_take(quick: list[int], tmp_path: Path) -> None:
    before, told = torch.get_num_threads(), []
    found = fill(Wanted(name="mine", device="cpu", folder=tmp_path, seconds=0.1, ranks=4), say=told.append)
    assert told == ["products of fp32", "products of bf16", "memory", "calls", "disk", "links"]
    assert torch.get_num_threads() == before
    assert set(quick) == {max(1, len(filling.os.sched_getaffinity(0)) // 4)}
    assert Hardware.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found
    assert found.ranks_per_node == 4
    assert found.device.flops_per_s == {"fp32": 2 * 64**3 / 1e-3, "bf16": 2 * 64**3 / 1e-3}
    assert product_s(found.device, 64, 64, 64, dtype="fp32", itemsize=4) == pytest.approx(1e-3)
    assert found.device.launch_s > 0
    assert set(found.channels) == {"disk_read", "disk_write"}
    assert found.channels["disk_write"].bytes_per_s == pytest.approx(disk.SIZES[-1] / 1e-4)
    assert found.inside == found.between
    said = "\n".join(found.sources)
    assert all(
        words in said for words in ("measured on 20", "no maker's peak", "O_DIRECT on ext4", "between: not measured")
    )
    assert summary(found).splitlines()[1].startswith("  fp32        0.0005243 TFLOP/s at most, (64, 64) x (64, 64); 2")


def test_links_that_were_measured_before(quick: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "measure_here", lambda *_: pytest.fail("they are given"))
    wanted = Wanted(name="", device="cpu", seconds=0.1, links=ring(2, 1e-5, 1e9), network=ring(8, 1e-4, 1e8, nodes=2))
    found = fill(wanted)
    assert found.inside.bytes_per_s == pytest.approx(1e9)
    assert found.between.bytes_per_s == pytest.approx(1e8)
    assert found.between.latency_s == pytest.approx(1e-4)
    assert found.channels == {}
    assert "between: zoo bench comm, 8 ranks on 2 nodes" in found.sources[-1]
    alone = fill(Wanted(name="", device="cpu", seconds=0.1, ranks=1, network=ring(8, 1e-4, 1e8, nodes=2)))
    assert alone.inside == alone.between
    with pytest.raises(ValueError, match="one rank on a processor has no links to measure; give --ranks 2"):
        fill(Wanted(name="", device="cpu", seconds=0.1, ranks=1))


def test_one_gpu_has_copies_and_its_link_is_as_those_to_the_host(
    quick: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    about = SimpleNamespace(name="A GPU", total_memory=1 << 34, multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(computing, "call_cost", lambda *_, **__: TIMING)
    lines = {name: Line(alpha_s=1e-5, bytes_per_s=2e10, error=0.0) for name in computing.COPIES}
    monkeypatch.setattr(computing, "copies", lambda *_, **__: lines)
    monkeypatch.setattr(ranks, "measure_here", lambda *_: pytest.fail("one device has nobody to talk to"))
    found = fill(Wanted(name="gpu", seconds=0.1))
    assert Hardware.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert (found.device.name, found.device.units, found.ranks_per_node) == ("A GPU", 100, 1)
    assert set(found.channels) == {"to_device", "to_host", "host_memory"}
    assert (found.inside.latency_s, found.inside.bytes_per_s) == (1e-5, 2e10)
    assert "inside: not measured, there is one device; as to_host" in found.sources


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of("auto") == device_of("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device = 'cuda', and torch sees 0 GPUs; zoo doctor says why"):
        device_of("cuda")
    for wrong in ("tpu", "cpu:1", "cuda:x", "", "cuda:-1"):
        with pytest.raises(ValueError, match=f"device = '{wrong}'; allowed are auto, cpu, cuda, cuda:0"):
            device_of(wrong)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("auto") == torch.device("cuda", 0)
    assert device_of("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="device = 'cuda:2', and torch sees 2 GPUs"):
        device_of("cuda:2")


def test_what_cannot_be_wanted() -> None:
    for wrong, words in (
        ({"dtypes": ("int8",)}, "dtype = 'int8'; allowed are fp32, bf16, fp16"),
        ({"dtypes": ()}, "no dtype is given"),
        ({"seconds": -1.0}, "seconds = -1.0"),
        ({"ranks": 0}, "ranks = 0; allowed are 1"),
        ({"links": ring(4, 1e-5, 1e9, nodes=2)}, "--links has a result of 2 nodes; give it as --network"),
        ({"network": ring(4, 1e-5, 1e9)}, "--network has a result of one node"),
    ):
        with pytest.raises(ValueError, match=words):
            Wanted(name="", **wrong)  # type: ignore[arg-type]


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_that_is_read_by_its_name(quick: list[int], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    result = zoo(
        "bench", "hardware", "--write", path, "--device", "cpu", "--seconds", 0.1, "--no-disk", "--dtype", "fp32"
    )
    assert result.exit_code == 0, result.output
    found = read_hardware(path)
    assert (found.name, list(found.device.flops_per_s), dict(found.channels)) == ("mine", ["fp32"], {})
    assert "launch" in result.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.json"]


def test_what_the_command_refuses_before_it_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(computing, "products", lambda *_, **__: pytest.fail("nothing is measured"))
    path, text, other = tmp_path / "mine.json", tmp_path / "text", tmp_path / "other.json"
    text.write_text("{")
    other.write_text('{"format": "something else"}')
    for wrong, words in (
        (["--write", tmp_path / "no" / "x.json"], "cannot be written: No such file or directory"),
        (["--write", tmp_path], "is a folder"),
        (["--write", path, "--device", "tpu"], "device = 'tpu'; allowed are"),
        (["--write", path, "--dtype", "int8"], "dtype = 'int8'"),
        (["--write", path, "--links", text], "cannot be read as JSON"),
        (["--write", path, "--network", other], "format = 'something else'; this reads"),
        (["--write", path, "--links", tmp_path / "nowhere"], "cannot be read as JSON"),
    ):
        result = zoo("bench", "hardware", *wrong)
        assert (result.exit_code, words in result.output) == (2, True), result.output
        assert not path.exists()


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    result = zoo("bench", "hardware", "--write", path, "--device", "cpu", "--seconds", 6, "--folder", tmp_path)
    if result.exit_code == 2 and "cannot be measured" in result.output:
        pytest.skip("the folder of the tests has no direct transfers")
    assert result.exit_code == 0, result.output
    found = read_hardware(path)
    assert len(found.device.products["fp32"]) > 5
    assert found.device.launch_s < 1e-3
    assert found.inside.bytes_per_s > 1e6
    assert [entry.name for entry in tmp_path.iterdir()] == ["here.json"]


def test_a_ranks_share_of_the_processors_copies_in_host_memory() -> None:
    threads = torch.get_num_threads()
    found = filling.host_memory(2, 0.05)
    assert 1e7 < found.bytes_per_s < 1e13
    assert torch.get_num_threads() == threads
