"""The process of the launcher on each node: starts the ranks there, tells what becomes of them, leaves nothing.

``python -m zoo.launch.agent`` reads commands and writes events, one JSON object a line, on its standard input and
output: through a pipe on this host, through ssh on another. The end of its input means that whoever ruled is gone: it
ends everything and itself; and so does a silence of ``--lost-s`` seconds, where that is given.

There are two processes: the *agent*, which adopts orphans beneath it, and above it the *keeper*, which does so too and
does nothing but wait. Whichever is killed, the other ends what is left.

Commands: ``{"start": {...}}`` (:class:`Start`), ``{"stop": signal, "grace_s": seconds}``, ``{"stacks": true}``,
``{"quit": true}``, ``{"beat": true}``. Events have one of the keys "hello", "problem", "report", "stacks", "exit",
"text", "quiet", "ignored", "ended", "killed", "left", "beat".
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from zoo.launch import cores, processes, worker
from zoo.launch.outlet import Outlet
from zoo.launch.silence import Beats, Silence

_STARTUP_OF_WORKER = [sys.executable, "-m", "zoo.launch.worker"]
_KEPT = 8192
"""Characters of a rank's output that are told when it fails."""
_FULL_PIPE = 32
"""Reads of 64 KiB that empty a pipe, of which Linux makes none larger than 1 MiB unless root asks for more."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What an agent is to start: one generation of a job, on its node."""

    generation: int
    command: list[str]
    """Of :mod:`zoo.launch.worker`: SCRIPT, -m MODULE or --no-python PROGRAM, and arguments."""
    ranks: list[int]
    world: int
    node: int
    nodes: int
    environment: dict[str, str]
    """Added to that of the agent, for every rank."""
    shown: list[int]
    """Ranks whose output is sent on."""
    slots: list[int] | None = None
    """Devices of the ranks: CUDA_VISIBLE_DEVICES; None: as it is."""
    cores: str | None = None
    """Cores of their own for the ranks: "0-3,8", or "all"; None: as they are."""
    local_rank: bool = False
    """Scripts get ``--local_rank=N`` before their arguments."""
    log_dir: str | None = None
    grace_s: float
    """From the signal that ends ranks to SIGKILL."""
    hang_s: float | None = None
    """After so long without output of any of the ranks the node is said to be quiet."""
    port: int | None = None
    """That must be free on this host; None: not asked."""

    def bound(self) -> list[list[int]]:
        """The cores of each rank.

        Raises:
            ValueError: there are not enough.
        """
        return cores.bind(len(self.ranks), os.sched_getaffinity(0), None if self.cores == "all" else self.cores)

    def problem(self) -> str | None:
        """Why it cannot be started here, as the end of a sentence; None: it can."""
        if self.cores is not None:
            try:
                self.bound()
            except ValueError as error:
                return str(error)
        if self.slots is not None:
            from zoo.launch.job import gpus

            there = gpus(os.environ)
            if there and (missing := [slot for slot in self.slots if slot not in there]):
                return f"it has no GPU {missing[0]}, only {there}; correct the file of hosts, or --include"
        if self.command[0] not in ("-m", "--no-python") and not Path(self.command[0]).is_file():
            return f"there is no script {self.command[0]!r} in {os.getcwd()!r}; give the path of a Python program"
        if self.port is not None:
            with socket.socket() as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    tried.bind(("", self.port))
                except OSError as error:
                    return f"port {self.port} cannot be used ({error.strerror}); give another with --master-port"
        return None


@dataclass
class _Rank:
    """A rank of this node, running or not."""

    rank: int
    process: subprocess.Popen[bytes]
    logs: dict[str, IO[bytes]]
    files: list[IO[bytes]] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    code: int | None = None

    def last_words(self) -> str:
        return "".join(self.tail)[-_KEPT:].encode(errors="surrogateescape").decode(errors="replace")


class Agent:
    """Carries out commands until its input ends or it is told to quit.

    Args:
        keeper: the process above it.
        lost_s: silence after which whoever rules is lost; None: the end of the input is all that counts.
    """

    def __init__(self, keeper: int, lost_s: float | None = None) -> None:
        self._keeper = keeper
        self._silence = None if lost_s is None else Silence(lost_s)
        self._spoken = self._deaf = False
        self._outlet = Outlet(self._listen)
        self._ranks: dict[int, _Rank] = {}
        self._selector = selectors.DefaultSelector()
        self._input, self._partial = b"", dict[int, bytes]()
        self._start: Start | None = None
        self._kill_at: float | None = None
        self._quits = self._quiet = False
        self._heard = 0.0
        self._wakeup = os.pipe()

    def run(self) -> int:
        """Until it is told to quit, its input ends, or SIGTERM or SIGINT comes. Returns the exit code."""
        for end in self._wakeup:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        if self._silence is not None:
            Beats(self._silence.beat_s, self._outlet.beat)
        self._selector.register(0, selectors.EVENT_READ, self._read_commands)
        self._selector.register(self._wakeup[0], selectors.EVENT_READ, self._read_signals)
        self._say(hello=hello())
        while not (self._quits and self._start is None):
            for key, _ in self._selector.select(self._wait_s()):
                key.data()
            self._listen()
            self._carry_out_all()
            self._reap()
            self._hear(quiet=True)
            self._end_when_due()
        left = processes.end_descendants(0.0)
        if left:
            self._say(left=left)
        return 0

    # -- what comes in ------------------------------------------------------------------------------------------------

    def _read_commands(self) -> None:
        if self._deaf:
            return
        try:
            found = os.read(0, 1 << 20)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        self._spoken, self._input = True, self._input + found
        if not found:
            self._lose("is gone")

    def _listen(self) -> None:
        """One turn, also of a wait until whoever rules takes what is said: what comes in, or that it is silent."""
        self._read_commands()
        heard, self._spoken = self._spoken, False
        if not self._deaf and self._silence is not None and self._silence.turn(heard):
            self._lose(f"has not been heard of for {self._silence.lost_s:g} s")

    def _lose(self, how: str) -> None:
        """Whoever rules is gone, and nobody reads what this process says."""
        self._selector.unregister(0)
        self._deaf = self._outlet.closed = True
        if self._start is not None:
            name = socket.gethostname()
            sys.stderr.write(f"zoo launch: host {name}: whoever started this job {how}; its ranks are ended.\n")
        self._stop(quits=True)

    def _carry_out_all(self) -> None:
        *lines, self._input = self._input.split(b"\n")
        for line in lines:
            self._carry_out(json.loads(line))

    def _carry_out(self, command: dict[str, Any]) -> None:
        if "start" in command:
            self._begin(Start(**command["start"]))
        elif "stop" in command:
            self._stop(quits=False, number=command["stop"], grace_s=command.get("grace_s"))
        elif "stacks" in command:
            processes.send(signal.SIGQUIT, self._running())
        elif "quit" in command:
            self._stop(quits=True)

    def _read_signals(self) -> None:
        numbers = set(os.read(self._wakeup[0], 4096))
        asked = numbers & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        if asked:
            name = signal.Signals(min(asked)).name
            gone = "" if os.getppid() == self._keeper else ", because the process above it was killed"
            self._say(problem=f"its agent got {name}{gone}", code=128 + min(asked))
            self._stop(quits=True)

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _begin(self, start: Start) -> None:
        problem = start.problem()
        self._start, self._kill_at, self._ranks = start, None, {}
        self._heard, self._quiet = time.monotonic(), False
        if problem is None:
            try:
                for place, rank in enumerate(start.ranks):
                    self._ranks[rank] = self._spawn(start, place, rank)
            except OSError as error:
                problem = f"rank {rank} cannot be started: {error}"
        if problem is not None:
            self._say(problem=problem, code=2)
            self._stop(quits=False)

    def _spawn(self, start: Start, place: int, rank: int) -> _Rank:
        reads, writes = os.pipe()
        logs: dict[str, IO[bytes]] = {}
        if start.log_dir is not None:
            folder = Path(start.log_dir, f"rank{rank}")
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("stdout", "stderr"):
                logs[name] = (folder / f"{name}.log").open("ab", buffering=0)
        environment = {**os.environ, **start.environment, **_variables(start, place, rank)}
        environment |= {worker.AGENT: str(os.getpid()), worker.REPORT: str(writes)}
        if start.cores is not None:
            mine = start.bound()[place]
            environment |= {worker.CORES: ",".join(map(str, mine)), "OMP_NUM_THREADS": str(len(mine))}
        command, begin = list(start.command), 1 + (start.command[0] in ("-m", "--no-python"))
        if start.local_rank:
            command.insert(begin, f"--local_rank={place}")
        process = subprocess.Popen(
            [*_STARTUP_OF_WORKER, *command], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, pass_fds=[writes],
        )  # fmt: skip
        os.close(writes)
        found = _Rank(rank, process, logs)
        for name, file in (("stdout", process.stdout), ("stderr", process.stderr), ("", os.fdopen(reads, "rb", 0))):
            if file is None:
                raise AssertionError(f"rank {rank} has no pipe.")
            os.set_blocking(file.fileno(), False)
            found.files.append(file)
            self._selector.register(file, selectors.EVENT_READ, lambda f=file, n=name: self._read(found, f, n))
        return found

    def _read(self, rank: _Rank, file: IO[bytes], name: str) -> bool:
        """What a rank wrote; False: there is nothing now, or nothing will come."""
        try:
            found = os.read(file.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not found:
            self._close(rank, file)
            return False
        if name == "":
            self._read_report(rank, file.fileno(), found)
            return True
        self._hear(quiet=False)
        text = found.decode(errors="surrogateescape")  # all bytes arrive, also where a letter comes in two pieces
        rank.tail.append(text)
        if name in rank.logs:
            try:
                rank.logs[name].write(found)
            except OSError as error:
                del rank.logs[name]
                self._say(problem=f"the {name} of rank {rank.rank} cannot be logged: {error.strerror}", code=1)
                self._stop(quits=False)
        if self._start is not None and rank.rank in self._start.shown:
            self._say(text=text, rank=rank.rank, stream=name)
        return True

    def _read_report(self, rank: _Rank, number: int, found: bytes) -> None:
        """Exceptions are lines of JSON; all else are stacks."""
        *lines, self._partial[number] = (self._partial.get(number, b"") + found).split(b"\n")
        stacks = []
        for line in lines:
            if line.startswith(b'{"time"'):
                self._say(report=json.loads(line), rank=rank.rank)
            else:
                stacks.append(line.decode(errors="replace"))
        if stacks:
            self._say(stacks="\n".join(stacks), rank=rank.rank)

    def _close(self, rank: _Rank, file: IO[bytes]) -> None:
        self._selector.unregister(file)
        rank.files.remove(file)
        self._partial.pop(file.fileno(), None)
        file.close()

    def _reap(self) -> None:
        by_pid = {one.process.pid: one for one in self._ranks.values()}
        for pid, code in processes.reap():
            if pid in by_pid:
                self._ended(by_pid[pid], code)

    def _ended(self, rank: _Rank, code: int) -> None:
        rank.code = rank.process.returncode = code
        moment = time.time()
        names = {id(rank.process.stdout): "stdout", id(rank.process.stderr): "stderr"}
        for file in list(rank.files):
            for _ in range(_FULL_PIPE):  # all that it wrote; one that it has left may write for ever
                if file not in rank.files or not self._read(rank, file, names.get(id(file), "")):
                    break
            if file in rank.files:  # a process that it has left holds the other end
                self._close(rank, file)
        for log in rank.logs.values():
            log.close()
        self._say(
            exit=code, rank=rank.rank, pid=rank.process.pid, time=moment, last=rank.last_words(),
            stopped=self._kill_at is not None,
        )  # fmt: skip

    def _running(self) -> list[int]:
        return [one.process.pid for one in self._ranks.values() if one.code is None]

    # -- the end ------------------------------------------------------------------------------------------------------

    def _stop(self, *, quits: bool, number: int = signal.SIGTERM, grace_s: float | None = None) -> None:
        """A signal to the ranks now, SIGKILL to all that is left after the grace; once told again, the shorter one."""
        self._quits = self._quits or quits
        if self._start is None:
            return
        due = time.monotonic() + (self._start.grace_s if grace_s is None else grace_s)
        if self._kill_at is None:
            processes.send(number, self._running())
        self._kill_at = due if self._kill_at is None else min(due, self._kill_at)

    def _wait_s(self) -> float | None:
        """Seconds until there is something to do without an event."""
        times = [] if self._kill_at is None else [self._kill_at]
        if self._start is not None and self._start.hang_s is not None and not self._quiet:
            times.append(self._heard + self._start.hang_s)
        if self._silence is not None and not self._deaf:
            times.append(time.monotonic() + self._silence.beat_s)
        return processes.wait_s(times)

    def _hear(self, quiet: bool) -> None:
        """Whether the ranks of this node have been silent for as long as counts as hanging."""
        if not quiet:
            self._heard = time.monotonic()
        elif self._start is None or self._start.hang_s is None or time.monotonic() - self._heard < self._start.hang_s:
            return
        if quiet != self._quiet:
            self._quiet = quiet
            self._say(quiet=quiet)

    def _end_when_due(self) -> None:
        if self._start is None:
            return
        due = self._kill_at is not None and time.monotonic() >= self._kill_at
        if due:
            ignoring = [one.rank for one in self._ranks.values() if one.code is None]
            if ignoring:
                self._say(ignored=ignoring)
            processes.send(signal.SIGKILL, processes.descendants(os.getpid()))
            while self._running():
                self._reap()
                time.sleep(0.005)
        if due or not self._running():
            if self._kill_at is None:  # ranks that came to their end by themselves may have left others behind
                self._kill_at = time.monotonic()
            left = processes.end_descendants(1.0 if not due else 0.0)
            generation, self._start = self._start.generation, None
            self._say(ended=generation, left=left)

    def _say(self, **event: Any) -> None:
        self._outlet.say(event)


def say(event: dict[str, Any]) -> None:
    """An event to whoever rules; nothing where it is gone."""
    with contextlib.suppress(OSError):
        os.write(1, (json.dumps(event) + "\n").encode())


def hello() -> dict[str, Any]:
    """What a node is compared by."""
    found: dict[str, Any] = {"host": socket.gethostname(), "time": time.time(), "pid": os.getpid()}
    found["python"] = ".".join(map(str, sys.version_info[:3]))
    for name in ("torch", "zoo-core"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _variables(start: Start, place: int, rank: int) -> dict[str, str]:
    """Those that torchrun sets for a rank."""
    found = {
        "RANK": rank, "LOCAL_RANK": place, "WORLD_SIZE": start.world, "LOCAL_WORLD_SIZE": len(start.ranks),
        "GROUP_RANK": start.node, "GROUP_WORLD_SIZE": start.nodes, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": start.world,
        "ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": start.generation,
    }  # fmt: skip
    variables = {name: str(value) for name, value in found.items()}
    if start.slots is not None:
        names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        # A slot is one of those that are visible here, whatever their names are; problem() has seen that they are.
        chosen = [names[slot] if slot < len(names) and names[slot] else str(slot) for slot in start.slots]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    if len(start.ranks) > 1 and "OMP_NUM_THREADS" not in {**os.environ, **start.environment}:
        variables["OMP_NUM_THREADS"] = "1"
    return variables


def main() -> int:
    """The keeper: forks the agent, waits for it, and ends what is left."""
    keeper, lost_s = os.getpid(), float(sys.argv[2]) if sys.argv[1:2] == ["--lost-s"] else None
    processes.adopt_orphans()
    agent = os.fork()
    if agent == 0:
        processes.die_with(keeper, signal.SIGTERM)
        processes.adopt_orphans()
        return Agent(keeper, lost_s).run()
    os.close(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: processes.send(received, [agent]))
    _, status = os.waitpid(agent, 0)
    code = os.waitstatus_to_exitcode(status)
    left = processes.end_descendants(0.0)
    if code < 0:
        say({"killed": -code, "left": left})
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
