"""fio as a contender: the command line of a job, and what its JSON says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.io.points import Point
from benchmarks.launch import ContenderError

ABSENT = "fio is not installed (a system package, e.g. apt-get install fio): there is nothing to take ratios to"


def find_fio() -> str | None:
    """fio's path, or None."""
    return shutil.which("fio")


def version() -> str:
    """E.g. ``fio-3.33``, or "not installed"."""
    fio = find_fio()
    if fio is None:
        return "not installed"
    return subprocess.run([fio, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def command(engine: str, op: str, point: Point, path: Path, num_bytes: int) -> list[str]:
    """One job in a process of its own, sequential and direct; ``op`` is "write", "read" or "new".

    fio would spend its own CPU time on new contents for every write and on clocks: all of that is off. A new file ends
    with an fsync and is not allocated ahead; fio sets its length before its clock starts.
    """
    options = {
        "name": op, "filename": str(path).replace(":", "\\:"), "size": num_bytes,
        "rw": "read" if op == "read" else "write", "direct": 1, "bs": point.block_size,
        "ioengine": engine, "iodepth": point.queue_depth, "numjobs": 1,
        "refill_buffers": 0, "scramble_buffers": 0, "gtod_reduce": 1,
        "fallocate": "none", "end_fsync": int(op == "new"), "output-format": "json",
    }  # fmt: skip
    if engine == "io_uring":
        options |= {"fixedbufs": int(point.fixed), "registerfiles": int(point.fixed), "hipri": 0}
    return [find_fio() or "fio", *(f"--{key}={value}" for key, value in options.items())]


def parse(text: str, op: str) -> dict[str, Any]:
    """Bytes, seconds and CPU seconds (user + system) of the one job in fio's JSON; notes may stand before it.

    fio gives CPU as percent of the job's runtime, whose unit is ms, and the runtime of the transfer in ms.

    Raises:
        ContenderError: no JSON, or a job that failed.
    """
    try:
        job = json.loads(text[text.index("{") :])["jobs"][0]
    except (ValueError, KeyError, IndexError) as error:
        raise ContenderError(f"fio did not write the JSON of a job: {text.strip()[-400:]!r}") from error
    if job["error"]:
        raise ContenderError(f"fio's job ended with error {job['error']}")
    side = job["read" if op == "read" else "write"]
    return {
        "num_bytes": side["io_bytes"],
        "wall_s": side["runtime"] / 1e3,
        "cpu_s": (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3,
    }


def environment(huge_pages: bool) -> dict[str, str]:
    """``huge_pages``: glibc (2.35 and newer) asks for transparent huge pages for what fio allocates.

    A request of 1 MiB is 256 segments of 4 KiB or one or two of 2 MiB; some devices are twice as fast with the latter.
    """
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge_pages else {}
    return {**os.environ, **tunables}


def run_fio(
    engine: str, op: str, point: Point, path: Path, num_bytes: int, *, huge_pages: bool, timeout_s: float = 300.0
) -> dict[str, Any]:
    """Run one job.

    Raises:
        ContenderError: fio is absent, failed, or moved another number of bytes.
    """
    if find_fio() is None:
        raise ContenderError(ABSENT)
    if op == "new":
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:  # fio writes files of its own state into its working directory
        try:
            result = subprocess.run(
                command(engine, op, point, path, num_bytes),
                cwd=folder, env=environment(huge_pages), capture_output=True, text=True, check=False, timeout=timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ContenderError(f"fio did not end within {timeout_s:.0f} s") from error
    if result.returncode != 0:
        raise ContenderError(f"fio ended with {result.returncode}: {(result.stderr or result.stdout).strip()[-400:]}")
    figures = parse(result.stdout, op)
    if figures["num_bytes"] != num_bytes:
        raise ContenderError(f"fio moved {figures['num_bytes']} bytes of {num_bytes}")
    return figures
