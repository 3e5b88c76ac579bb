"""The Rust module, io_uring, direct transfers and page-locked memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.cli.doctor.report import Finding, State

_SETTINGS = {
    "block_size": 1 << 20, "queue_depth": 8, "num_threads": 1, "single_submit": False, "overlap_events": True,
    "bounce_bytes": 16 << 20,
}  # fmt: skip
SWITCH = Path("/proc/sys/kernel/io_uring_disabled")
_REINSTALL = "pip install --force-reinstall --no-deps .  # in a clone of zoo; needs cargo (rustup.rs)"


def transfers(folder: Path, gpus: bool) -> Iterator[Finding]:
    """What moves bytes.

    Args:
        folder: on the file system whose direct transfers are asked for.
        gpus: whether this machine has some, so that page-locked memory matters.
    """
    try:
        from zoo.io import _native
    except ImportError as error:
        yield Finding(
            section="transfers", name="Rust module", state=State.BROKEN, remedy=_REINSTALL,
            value=f"zoo.io._native cannot be imported: {_first_line(error)}",
        )  # fmt: skip
        return
    yield Finding(section="transfers", name="Rust module", value=f"zoo.io._native {_native.__version__}")
    yield _ring(_native)
    yield _direct(_native, folder)
    yield _pinning(_native, gpus)
    yield _gpu_direct(_native, gpus)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _ring(native: Any, switch: Path = SWITCH) -> Finding:
    try:
        native.Engine(backend="uring", **_SETTINGS).close()
    except RuntimeError as error:
        return Finding(
            section="transfers",
            name="io_uring",
            value=f"{_first_line(error)}; transfers run on blocking threads",
            state=State.LIMITED,
            remedy=_why_refused(switch),
        )
    return Finding(section="transfers", name="io_uring", value="usable")


def _why_refused(switch: Path) -> str:
    try:
        level = switch.read_text().strip()
    except OSError:
        level = ""
    if level in ("1", "2"):
        return f"sysctl -w kernel.io_uring_disabled=0  # it is {level}"
    return (
        "docker run --security-opt seccomp=unconfined  # or a profile that allows io_uring_setup, io_uring_enter and "
        "io_uring_register; outside a container: Linux 5.10 or newer"
    )


def _direct(native: Any, folder: Path) -> Finding:
    name = "direct transfers"
    try:
        with tempfile.TemporaryDirectory(prefix="zoo-doctor-", dir=folder) as inside:
            file = native.File(Path(inside) / "probe", True, "auto", False)
            alignment, why = file.alignment, file.why_buffered
            file.close()
    except OSError as error:
        return Finding(
            section="transfers", name=name, value=f"{folder} cannot be written: {error.strerror or error}",
            state=State.LIMITED, remedy="zoo doctor --folder DIR  # a folder that can",
        )  # fmt: skip
    if alignment is None:
        return Finding(
            section="transfers", name=name, value=f"in {folder}: no, {why}; bytes go through the page cache",
            state=State.LIMITED, remedy="zoo doctor --folder DIR  # one on a local disk (ext4, xfs)",
        )  # fmt: skip
    memory, offset = alignment
    return Finding(
        section="transfers", name=name, value=f"in {folder}: memory at multiples of {memory} bytes, offsets of {offset}"
    )


def _pinning(native: Any, gpus: bool) -> Finding:
    problem = native.cuda_problem()
    if problem is None:
        return Finding(section="transfers", name="page-locked memory", value="by the CUDA runtime")
    return Finding(
        section="transfers",
        name="page-locked memory",
        value=problem if gpus else f"{problem}; without a GPU it is not needed",
        state=State.LIMITED if gpus else State.FACT,
        remedy="pip install nvidia-cuda-runtime  # or the CUDA toolkit of the system" if gpus else "",
    )


def _gpu_direct(native: Any, gpus: bool) -> Finding:
    log = os.environ.get("CUFILE_LOGFILE_PATH")
    os.environ.setdefault("CUFILE_LOGFILE_PATH", "")  # no file cufile.log in the current folder
    try:
        native.Engine(backend="gds", **_SETTINGS).close()
    except RuntimeError as error:
        return Finding(
            section="transfers", name="GPUDirect Storage", value=_first_line(error),
            state=State.ABSENT if gpus else State.FACT, remedy="pip install nvidia-cufile" if gpus else "",
        )  # fmt: skip
    finally:
        if log is None:
            os.environ.pop("CUFILE_LOGFILE_PATH", None)
    return Finding(section="transfers", name="GPUDirect Storage", value="cuFile is there")
