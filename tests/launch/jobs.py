"""Jobs of ``zoo launch`` in tests, and whether anything of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MARK = "ZOO_TEST_LAUNCH_MARK"
LAUNCH = ("-m", "zoo.cli", "launch")

SCRIPT = """
import os, signal, subprocess, sys, time
rank, mode = int(os.environ["RANK"]), sys.argv[1]
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode in ("wait", "stubborn", "fails", "ends"):  # a daemon that nobody waits for, and a child of the rank
    subprocess.Popen(["sh", "-c", "setsid sleep 300 & setsid sleep 300 & sleep 300"], start_new_session=True)
print("rank", rank, "of", os.environ["WORLD_SIZE"], "began", flush=True)
print("rank", rank, "says to stderr", file=sys.stderr, flush=True)
if len(sys.argv) > 2:
    open(os.path.join(sys.argv[2], f"{rank}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"), "w").write(str(os.getpid()))
if mode == "fails" and rank == 1:
    def inner():
        raise ValueError("the learning rate is a fish")
    inner()
if mode == "exits" and rank == 1:
    print("my last words", file=sys.stderr)
    os._exit(7)
if mode == "ends" and rank == 1:
    sys.exit(0)
if mode in ("wait", "stubborn", "fails", "exits", "ends"):
    time.sleep(200)
"""


@dataclass
class Launched:
    """A running ``zoo launch``."""

    process: subprocess.Popen[str]
    mark: str
    folder: Path
    said: str = ""
    took_s: float = 0.0
    errors: str = ""
    ranks: dict[int, int] = field(default_factory=dict)

    def wait_for_ranks(self, ranks: int, generation: int = 0, timeout_s: float = 120) -> dict[int, int]:
        """Rank → process, once all have begun."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            files = [self.folder / f"{rank}.{generation}" for rank in range(ranks)]
            texts = [file.read_text() if file.is_file() else "" for file in files]
            if all(texts):
                self.ranks = {rank: int(text) for rank, text in enumerate(texts)}
                return self.ranks
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"{ranks} ranks have not begun: {self.finish(20)}")

    def finish(self, timeout_s: float = 60) -> str:
        """What it printed, once it has ended."""
        began = time.monotonic()
        out, err = self.process.communicate(timeout=timeout_s)
        self.took_s = time.monotonic() - began
        self.said, self.errors = out, err
        return out + err

    def left(self, within_s: float = 10.0) -> list[str]:
        """Command lines of processes of this job that still live after so many seconds, itself aside."""
        until = time.monotonic() + within_s
        while True:
            found = [text for pid, text in alive(self.mark).items() if pid != self.process.pid]
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.05)

    def above(self, pid: int) -> int:
        """The parent of a process."""
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(mark: str) -> dict[int, str]:
    """Process → command line, of all that have the mark in their environment."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    if state not in "ZX":
                        found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def hear_signals() -> None:
    """In a child: where tests run in the background of a shell SIGINT would be ignored, and SIGHUP beneath nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def basics(folder: Path, mark: str) -> dict[str, str]:
    """Variables of a job whose home is ``folder``. Where compiled kernels are does not depend on that."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return {MARK: mark, "CUDA_VISIBLE_DEVICES": "", "HOME": str(folder), "XDG_CACHE_HOME": cache}


def new_mark() -> str:
    """What the processes of a job have in their environment."""
    return f"mark-{uuid.uuid4().hex}"


@contextlib.contextmanager
def launched(
    folder: Path, *arguments: str, script: str = SCRIPT, program: Sequence[str] = LAUNCH, inside: bool = False,
    mark: str = "", before: Sequence[str] = (), **variables: str,
) -> Iterator[Launched]:  # fmt: skip
    """``zoo launch ARGUMENTS`` (or another program) where the word SCRIPT is a file of this text; ``inside`` that
    folder; with ``before`` before the whole command."""
    mark, file = mark or new_mark(), folder / "script.py"
    file.write_text(script)
    words = [str(file) if word == "SCRIPT" else word for word in arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_", "PMI_"))}
    environment |= {**basics(folder, mark), **variables}
    process = subprocess.Popen(
        [*before, sys.executable, *program, *words], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=folder if inside else None,
        preexec_fn=hear_signals,
    )  # fmt: skip
    found = Launched(process, mark, folder)
    try:
        yield found
    finally:
        process.kill()
        for pid in alive(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
