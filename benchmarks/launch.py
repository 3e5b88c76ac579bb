"""Starts contenders in fresh processes and brings back what each rank wrote; and what these processes do.

A worker is a module that ends with ``answer(measure)``: ``measure(spec, rank)`` gives the figures of one rank. What a
spec has as "variables" goes to the rank's environment first.
:func:`run_ranks` runs it once a rank, :class:`Server` forks its ranks from one process, :func:`start` runs a command
line whose rank 0 prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.turns import leave


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


def threads_as_given() -> dict[str, str | None]:
    """Variables for a process with as many threads as whoever started this one says."""
    return {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


class Server:
    """Runs ranks as :func:`run_ranks` does, forked from one process that has everything imported."""

    def __init__(self, worker: str, variables: Mapping[str, str] | None = None) -> None:
        self._worker, self._variables = worker, variables
        self._process: subprocess.Popen[str] | None = None

    def run(self, spec: dict[str, Any], size: int, timeout_s: float = 180.0) -> list[dict[str, Any]]:
        """The figures by rank."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", self._worker, "--serve"]
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


def run_ranks(
    worker: str, spec: dict[str, Any], size: int, timeout_s: float = 180.0,
    variables: Mapping[str, str | None] | None = None,
) -> list[Any]:  # fmt: skip
    """Run the worker once a rank, all at once; returns the figures by rank.

    Args:
        worker: the module.
        variables: of the environment, beside :func:`environment`; None takes one away.

    Raises:
        ContenderError: a rank failed, or they did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = [sys.executable, "-m", worker, json.dumps(spec), folder]
        processes = []
        for rank in range(size):
            with (out / f"log{rank}").open("w") as log:
                env = _with(environment(rank, size), variables)
                processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))
        late = not _ended(processes, timeout_s)
        return _figures(spec, size, out, f"the processes did not end within {timeout_s:.0f} s" if late else "")


def start(
    module: str, arguments: Sequence[str], prefixes: Sequence[Sequence[str]], address: str = "127.0.0.1",
    device: str = "lo", timeout_s: float = 3600.0,
) -> Any:  # fmt: skip
    """Run a module's command line once for each of the prefixes (``ip netns exec …``), all at once.

    Returns:
        The JSON that rank 0 prints.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where: dict[str, str | None] = {
        "MASTER_ADDR": address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": device, **threads_as_given(),
    }  # fmt: skip
    ranks = []
    for rank, prefix in enumerate(prefixes):
        command = [*prefix, sys.executable, "-m", module, *arguments]
        env = _with(environment(rank, len(prefixes)), where)
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
    try:
        said = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: {[rank.returncode for rank in ranks]}")
    return json.loads(said[0])


def _with(given: Mapping[str, str], variables: Mapping[str, str | None] | None) -> dict[str, str]:
    return {key: value for key, value in {**given, **(variables or {})}.items() if value is not None}


def _ended(processes: Sequence[subprocess.Popen[Any]], timeout_s: float) -> bool:
    """Wait for all, or for the first that fails; none runs afterwards. Whether it was in time."""
    deadline = time.monotonic() + timeout_s
    try:
        while any(p.poll() is None for p in processes):
            if any(p.poll() not in (None, 0) for p in processes):
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return True


def _figures(spec: dict[str, Any], size: int, out: Path, why: str = "") -> list[Any]:
    results = [out / f"rank{rank}.json" for rank in range(size)]
    if not all(path.exists() for path in results):
        logs = [out / f"log{rank}" for rank in range(size)]
        said = [log.read_text(errors="replace").strip().splitlines()[-12:] if log.exists() else [] for log in logs]
        raise ContenderError(f"{spec}: " + " | ".join(filter(None, ["\n".join(lines) for lines in said] + [why])))
    return [json.loads(path.read_text()) for path in results]


# In the processes ----------------------------------------------------------------------------------------------------

Measure = Callable[[dict[str, Any], int], Any]


def answer(measure: Measure, *, joins: bool = True) -> None:
    """``worker SPEC OUT`` measures as one rank, ``worker --serve`` see :func:`_serve`. Ends the process.

    Args:
        joins: a gloo group of all ranks, with one thread each.
    """
    if sys.argv[1] == "--serve":
        _serve(measure)
        return
    _answer(measure, json.loads(sys.argv[1]), Path(sys.argv[2]), joins=joins)


def _answer(measure: Measure, spec: dict[str, Any], out: Path, *, joins: bool) -> None:
    """Figures go to OUT/rank<r>.json."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if joins:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=size)
    os.environ.update(spec.pop("variables", {}))
    figures = measure(spec, rank)
    leave()
    (out / f"rank{rank}.json").write_text(json.dumps(figures))
    if joins:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # some libraries hang or complain at exit; nothing is left to do


def _serve(measure: Measure) -> None:
    """For each line of stdin, a JSON [spec, size, OUT], fork the ranks, and write a line when all of them are over.

    Imports take longer than short measurements, and are made once here. A rank is a process of its own all the same.
    """
    import torch
    import torch.nn.parallel

    import zoo.zero  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        spec, size, out = json.loads(line)
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                with (Path(out) / f"log{rank}").open("w") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)})
                os.environ["LOCAL_WORLD_SIZE"] = str(size)
                try:
                    _answer(measure, spec, Path(out), joins=True)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        print("over", flush=True)
