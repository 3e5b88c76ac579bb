"""Starts a contender in fresh processes and brings back what each rank wrote."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT


class ContenderError(RuntimeError):
    """A contender's process failed; the message ends with what it said last."""

    @property
    def last(self) -> str:
        """The last line, without the number of its rank."""
        return re.sub(r"^\[rank\d+\]: ", "", str(self).strip().splitlines()[-1])


def environment(rank: int, size: int) -> dict[str, str]:
    """One thread a rank, gloo over the loopback device, zoo from this checkout."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {
        **os.environ,
        "PYTHONPATH": path,
        # DeepSpeed builds its shared-memory collectives on first use, with the ninja of this environment.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


class Server:
    """Runs ranks as :func:`run_ranks` does, forked from one process that has everything imported."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = variables
        self._process: subprocess.Popen[str] | None = None

    def run(self, spec: dict[str, Any], size: int, timeout_s: float = 180.0) -> list[dict[str, Any]]:
        """The figures by rank."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "benchmarks.zero.worker", "--serve"]
            env = {**environment(0, size), **(self._variables or {})}
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                start_new_session=True,
            )  # fmt: skip
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise AssertionError("the server has no pipes.")
        with tempfile.TemporaryDirectory() as folder:
            process.stdin.write(json.dumps([spec, size, folder]) + "\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout_s)[0] or not process.stdout.readline():
                self.close()
            return _figures(spec, size, Path(folder))

    def close(self) -> None:
        """End it, and the ranks that still run."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


def _figures(spec: dict[str, Any], size: int, out: Path) -> list[dict[str, Any]]:
    results = [out / f"rank{rank}.json" for rank in range(size)]
    if not all(path.exists() for path in results):
        logs = [out / f"log{rank}" for rank in range(size)]
        said = [log.read_text().strip().splitlines()[-12:] if log.exists() else [] for log in logs]
        raise ContenderError(f"{spec}: " + " | ".join("\n".join(lines) for lines in said))
    return [json.loads(path.read_text()) for path in results]


def run_ranks(
    spec: dict[str, Any], size: int, timeout_s: float = 180.0, variables: Mapping[str, str] | None = None,
    worker: str = "benchmarks.zero.worker",
) -> list[dict[str, Any]]:  # fmt: skip
    """Run the worker once a rank, all at once, with these environment variables more; returns the figures by rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = [sys.executable, "-m", worker, json.dumps(spec), folder]
        processes = []
        for rank in range(size):
            with (out / f"log{rank}").open("w") as log:
                env = {**environment(rank, size), **(variables or {})}
                processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))
        deadline = time.monotonic() + timeout_s
        try:
            while any(p.poll() is None for p in processes):
                failed = any(p.poll() not in (None, 0) for p in processes)
                if failed or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return _figures(spec, size, out)


def answer(measure: Callable[[dict[str, Any], int], Any]) -> None:
    """What a process of :func:`run_ranks` does, ``worker SPEC OUT``: figures go to OUT/rank<r>.json."""
    import torch
    import torch.distributed as dist

    rank, size, out = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=size)
    figures = measure(json.loads(sys.argv[1]), rank)
    (out / f"rank{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)  # some libraries hang or complain at exit; nothing is left to do
