"""What benchmarks/io decides by itself: settings, fio's JSON, ratios, verdicts, contents of files, the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.io import figures, files, fio
from benchmarks.io.contenders import contenders
from benchmarks.io.points import Grid, Point, best_point
from benchmarks.io.report import console, write_page
from benchmarks.io.run import parser, size
from benchmarks.launch import ContenderError

MIB = 1 << 20


def job(**changes: Any) -> str:
    side = {"io_bytes": 1 << 30, "runtime": 500}
    one = {"error": 0, "read": {"io_bytes": 0, "runtime": 0}, "write": side, "usr_cpu": 1.5, "sys_cpu": 6.5}
    return "fio: a note\n" + json.dumps({"jobs": [{**one, "job_runtime": 400, **changes}]})


def test_fio_json_gives_bytes_seconds_and_cpu() -> None:
    found = fio.parse(job(), "new")
    assert found["num_bytes"] == 1 << 30
    assert found["wall_s"] == 0.5
    assert found["cpu_s"] == pytest.approx(0.08 * 0.4)
    assert fio.parse(job(), "read")["num_bytes"] == 0


@pytest.mark.parametrize("text", ["", "fio: no such engine", '{"jobs": []}', job(error=22)])
def test_fio_that_failed_is_an_error(text: str) -> None:
    with pytest.raises(ContenderError):
        fio.parse(text, "write")


def test_fio_command_asks_for_direct_equal_work() -> None:
    path = Path("a:b")
    new = fio.command("io_uring", "new", Point(block_size=MIB, queue_depth=4, fixed=True), path, 8 * MIB)
    assert {"--rw=write", "--direct=1", "--end_fsync=1", "--fixedbufs=1", "--bs=1048576", "--iodepth=4"} <= set(new)
    assert "--filename=a\\:b" in new
    read = fio.command("libaio", "read", Point(), path, 8 * MIB)
    assert {"--rw=read", "--end_fsync=0", "--refill_buffers=0", "--scramble_buffers=0"} <= set(read)
    assert not [word for word in read if word.startswith("--fixedbufs")]


def test_grid_varies_what_the_contender_has() -> None:
    grid = Grid(block_sizes=(MIB, 4 * MIB), queue_depths=(8, 32), num_threads=(1, 2))
    assert len(grid.points(())) == 4
    assert {p.num_threads for p in grid.points(("num_threads", "overlap_events"))} == {1, 2}
    assert len(grid.points(("num_threads", "overlap_events"))) == len(set(grid.points(("num_threads", "fixed")))) == 16
    assert not any(p.fixed or p.num_threads > 1 for p in grid.points(("overlap_events",)))


def test_the_best_point_is_by_median_and_not_by_a_lucky_pass() -> None:
    lucky, steady = Point(queue_depth=8), Point(queue_depth=32)
    seconds = [(lucky, 0.1), (lucky, 2.0), (lucky, 2.0), (steady, 1.0), (steady, 1.0), (steady, 1.1)]
    assert best_point([(p, {"num_bytes": MIB, "wall_s": s}) for p, s in seconds]) == steady
    assert best_point([]) is None


def one(rate: float, cpu: float = 0.01) -> dict[str, Any]:
    return {"num_bytes": 10**9, "wall_s": 1 / rate, "cpu_s": cpu}


def test_ratios_are_taken_to_the_best_fio_of_the_same_round() -> None:
    rounds = [
        {"fio-uring": one(4.0), "fio-libaio": one(2.0), "zoo": one(3.0)},
        {"fio-uring": one(1.0), "fio-libaio": one(2.0), "zoo": one(2.0)},
        {"zoo": one(9.0)},
        {"fio-uring": one(2.0), "fio-uring-huge": one(4.0), "zoo": one(3.0)},
    ]
    found = figures.to_fio(rounds, "zoo")
    assert found is not None
    assert found.values == pytest.approx((0.75, 1.0, 0.75))
    ordinary = figures.to_fio(rounds, "zoo", huge=False)
    assert ordinary is not None
    assert ordinary.values == pytest.approx((0.75, 1.0, 1.5))
    assert figures.to_fio(rounds, "ds") is None


def test_verdicts() -> None:
    assert figures.Target("rate", 0.96, 0.95).verdict.startswith("met")
    assert figures.Target("rate", 0.5, 1.0).verdict.startswith("**missed by 50.0 %**")
    assert figures.Target("cpu", 0.04, 0.05, at_most=True).verdict.startswith("met")
    assert figures.Target("cpu", 0.06, 0.05, at_most=True).verdict.startswith("**missed by 20.0 %**")
    assert figures.Target("cpu", None, 0.05).verdict == "not measured"


@pytest.mark.dear
@pytest.mark.parametrize("num_bytes", [MIB, files.WINDOW + 3 * MIB])
def test_contents_are_known_again_and_nothing_else_passes(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "data"
    files.create(path, num_bytes, salt=5)
    assert path.stat().st_size == num_bytes + files.SPARE
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    files.fill(tensor, 5)
    assert path.read_bytes()[:num_bytes] == tensor.numpy().tobytes()
    assert files.matches(tensor, 5)
    assert files.file_matches(path, num_bytes, 5)
    assert not files.file_matches(path, num_bytes, 6)
    tensor[num_bytes - 1] ^= 1
    assert not files.matches(tensor, 5)
    with path.open("r+b") as file:
        file.seek(num_bytes - 1)
        file.write(tensor[-1:].numpy().tobytes())
    assert not files.file_matches(path, num_bytes, 5)


def test_memory_is_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "filesystem", lambda _: "tmpfs")
    with pytest.raises(files.DirectoryError, match="tmpfs, which is memory"), files.data_folder(tmp_path, 1):
        pass
    monkeypatch.setattr(files, "filesystem", lambda _: "ext4")
    with pytest.raises(files.DirectoryError, match="needed at a time"), files.data_folder(tmp_path, 1 << 60):
        pass
    with files.data_folder(tmp_path, 1) as folder:
        (folder / "data").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_sizes() -> None:
    assert [size(text) for text in ("256K", "64M", "1g", "4096")] == [256 << 10, 64 << 20, 1 << 30, 4096]
    with pytest.raises(SystemExit):
        parser().parse_args(["--size", "large"])


def raw() -> dict[str, Any]:
    points = {name: Point().to_json() for name in ("fio-uring", "zoo")}
    windows = {"ratios": [0.98, 0.97], "running": [1.0, 1.0], "bytes_per_s": [1e9, 1e9]}
    return {
        "machine": {
            "date": "2000-01-01", "cores": 2, "cpu": "a CPU", "kernel": "6", "filesystem": "ext4", "fio": "fio-3",
            "huge_pages": "madvise", "python": "3.11", "torch": "2.11", "deepspeed": "not installed",
        },
        "settings": {
            "command": "python -m benchmarks.io", "num_bytes": 1 << 30, "rounds": 1, "grid_passes": 1,
            "grid_bytes": 1 << 20, "window_s": 1.0,
        },
        "missing": {"DeepSpeed, tensor": "Traceback\nImportError: it is not here"},
        "failures": {}, "gil": [{"zoo read": windows}], "load": {"write": [0.5]},
        "points": {"write": points},
        "grid": {"write": {"zoo": [{**one(2.0), "point": Point().to_json()}, {"error": "x", "point": {}}]}},
        "rounds": {"write": [{"fio-uring": one(4.0), "zoo": {**one(3.0), "cached": 0.0}}]},
    }  # fmt: skip


def test_the_page_says_what_is_missing_and_missed_and_keeps_its_remarks(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    page.write_text("earlier figures\n\n## Remarks\n\n- by hand\n")
    text = write_page(raw(), page).read_text()
    assert "**missing: DeepSpeed, tensor**: ImportError: it is not here" in text
    assert "**missed by 21.1 %** (0.750 against 0.950)" in text
    assert "from a pool buffer: at least 0.95 of fio's best engine      | not measured" in text
    assert "| 3.00 (3.00–3.00) | 0.75 (0.75–0.75) | 0.75 (0.75–0.75) | 0.010 (0.010–0.010) | 0%" in text
    assert text.endswith("## Remarks\n\n- by hand\n")
    assert "earlier figures" not in text
    assert "missing: DeepSpeed, tensor: ImportError" in console(raw())


def test_every_contender_says_what_it_does_and_follows_one_that_is_searched() -> None:
    known = contenders()
    assert {"fio-uring", "fio-libaio", "zoo", "zoo-pool", "zoo-threads", "ds", "ds-pinned", "python", "torch"} <= {
        *known
    }
    for name, contender in known.items():
        assert all([contender.buffer, contender.page_cache, contender.durable]), name
        assert (contender.engine is None) != (contender.open is None), name
        assert contender.follows is None or known[contender.follows].varies is not None, name
