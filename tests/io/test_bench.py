"""The sweep and its choice, the check of a machine, and the commands."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from zoo.cli import app
from zoo.config import load
from zoo.io import AioConfig, Handle, _native, bench
from zoo.io.bench import Measurement, Operation, Sweep, best, run
from zoo.io.verify import facts, verify


def measured(operation: Operation, block: int, depth: int, threads: int, rate: float) -> Measurement:
    return Measurement(
        operation=operation, block_size=block, queue_depth=depth, num_threads=threads, gigabytes_per_s=rate,
        lowest=rate, highest=rate, cpu_s_per_gigabyte=0.0,
    )  # fmt: skip


def test_the_choice_is_the_smallest_among_the_fast() -> None:
    points = [
        measured("read", 1 << 20, 8, 1, 3.00), measured("write", 1 << 20, 8, 1, 6.00),
        measured("read", 1 << 20, 32, 1, 3.01), measured("write", 1 << 20, 32, 1, 6.02),
        measured("read", 1 << 20, 8, 2, 3.02), measured("write", 1 << 20, 8, 2, 6.01),
        measured("read", 4096, 8, 1, 1.0), measured("write", 4096, 8, 1, 9.0),
    ]  # fmt: skip
    assert best(points) == AioConfig(block_size=1 << 20, queue_depth=8, intra_op_parallelism=1)
    faster = [*points, measured("read", 1 << 22, 8, 2, 3.5), measured("write", 1 << 22, 8, 2, 7.0)]
    assert best(faster) == AioConfig(block_size=1 << 22, queue_depth=8, intra_op_parallelism=2)


def test_a_sweep_measures_every_point_as_often_as_asked_and_cleans_up(folder: Path) -> None:
    calls = []
    sweep = Sweep(folder=folder, num_bytes=1 << 20, block_sizes=(8192, 65_536), queue_depths=(2,), repeats=2)
    found = run(sweep, progress=lambda done, of: calls.append((done, of)))
    assert calls == [(k + 1, 16) for k in range(16)]
    assert [(m.operation, m.block_size, m.num_threads) for m in found] == [
        (operation, block, threads) for operation in ("read", "write") for block in (8192, 65_536) for threads in (1, 2)
    ]
    assert all(0 < m.lowest <= m.gigabytes_per_s <= m.highest for m in found)
    assert not any(folder.iterdir())


def test_settings_that_are_none(folder: Path) -> None:
    with pytest.raises(ValueError, match="nothing to measure"):
        Sweep(folder=folder, operations=()).points()
    with pytest.raises(ValueError, match="block_size"):
        Sweep(folder=folder, block_sizes=(1000,)).points()


def test_more_bytes_than_there_are_anywhere_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"size = 1125899906842624; the memory of this machine is \d+ bytes"):
        run(Sweep(folder=folder, num_bytes=1 << 50))
    monkeypatch.setattr(bench, "_free", lambda folder: 5000)
    with pytest.raises(ValueError, match=r"size = 8192; the free space of .* is 5000 bytes: measure with a smaller"):
        run(Sweep(folder=folder, num_bytes=8192))
    assert not any(folder.iterdir())


def test_files_that_cannot_be_written_are_said_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "run", lambda *_, **__: pytest.fail("measured"))
    for option, file, words in (
        ("--json", "none/x.json", "x.json cannot be written: No such file or directory"),
        ("--plot", "none/x.png", "x.png cannot be written: No such file or directory"),
        ("--plot", "x.foo", "it takes .png, .svg, .pdf"),
    ):
        result = CliRunner().invoke(app, ["io", "bench", str(folder), option, str(folder / file)])
        assert result.exit_code == 2
        assert words in result.output


def test_every_way_of_this_machine_moves_bytes_as_it_should(folder: Path) -> None:
    known = facts(folder)
    assert known.direct.startswith(("yes: memory at multiples of", "no: "))
    outcomes = list(verify(folder, num_bytes=300_000, transfers=8))
    usable = [o for o in outcomes if o.backend == "threads" or known.io_uring == "yes"]
    assert len(outcomes) == 12
    assert [o for o in usable if o.problem] == []


def test_a_wrong_checksum_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "crc32c", lambda *_: 1)
    assert "checksum of" in str(next(iter(verify(folder, num_bytes=100_000, transfers=3))).problem)


def test_a_wrong_byte_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Handle.pread

    def corrupt(self: Handle, tensor: torch.Tensor, *args: object, **options: object) -> object:
        done = real(self, tensor, *args, **options)  # type: ignore[arg-type]
        tensor[-1:] ^= 1
        return done

    monkeypatch.setattr(Handle, "pread", corrupt)
    result = CliRunner().invoke(app, ["io", "verify", str(folder), "--size", "64K", "--transfers", "3"])
    assert result.exit_code == 1, result.output
    assert " are wrong" in result.output


@pytest.mark.dear
def test_the_commands(folder: Path) -> None:
    report, picture = folder / "io.json", folder / "io.png"
    options = ["--size", "1M", "--block-size", "64K", "--queue-depth", "4", "--threads", "1", "--repeats", "1"]
    command = ["io", "bench", str(folder), *options, "--json", str(report), "--plot", str(picture)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    written = json.loads(report.read_text())
    assert len(written["measurements"]) == 2
    config = load({"train_batch_size": 1, "aio": written["aio"]})
    assert config.aio == AioConfig(block_size=65_536, queue_depth=4)
    assert Handle.from_config(config.aio).config == config.aio
    assert picture.read_bytes()[:4] == b"\x89PNG"
    for what, wrong, words in (
        ("bench", ["--size", "1X"], "'1X' is no size"), ("bench", ["--operation", "fly"], "allowed are read, write"),
        ("bench", ["--block-size", "1000"], "block_size = 1000; allowed is"),
        ("bench", ["--queue-depth", "0"], "queue_depth = 0; allowed is"),
        ("bench", ["--threads", "65"], "threads = 65; allowed is"),
        ("verify", ["--transfers", "-1"], "transfers = -1; allowed is"),
        ("verify", ["--size", "0"], "size = 0; allowed is"),
    ):  # fmt: skip
        result = CliRunner().invoke(app, ["io", what, str(folder), *wrong])
        assert result.exit_code == 2
        assert words in result.output
        assert "right" not in result.output
        assert "pydantic" not in result.output


def test_the_section_of_a_configuration() -> None:
    config = load({"train_batch_size": 1, "aio": {"thread_count": 4, "block_size": 8192, "overlap_events": False}})
    with Handle.from_config(config.aio) as handle:
        assert handle.config == AioConfig(intra_op_parallelism=4, block_size=8192, overlap_events=False)
    for wrong, words in (
        ({"use_gds": "perhaps"}, "use_gds"),
        ({"block_size": 1000}, "block_size"),
        ({"depth": 1}, "depth"),
    ):
        with pytest.raises(ValueError, match=words):
            load({"train_batch_size": 1, "aio": wrong})
