"""The one process that rules a job: starts an agent on each host, prints, decides, and leaves nothing running.

States of a generation: its nodes are *starting*, *running* until each has said that it ended. The first failure begins
the end: after ``settle_s`` all are told to stop. A node whose agent is gone has ended too. Then either the next
generation starts on the nodes that are left, with new ranks and a new port, or the job is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

from zoo.launch import processes, report
from zoo.launch.agent import Start
from zoo.launch.job import Job, free_port
from zoo.launch.report import Failure
from zoo.launch.silence import Beats, Silence

_LATE_S = 3.0
"""Beyond the grace; an agent that has not told of its end by then does not answer."""
_COMPARED = ("python", "torch", "zoo-core")
_OPEN = 1 << 16
"""Characters of a line that are shown before its end."""


@dataclass
class _Node:
    """A host and its agent."""

    host: str
    slots: list[int]
    process: subprocess.Popen[bytes]
    partial: bytes = b""
    hello: dict[str, Any] | None = None
    skew_s: float = 0.0
    running: bool = False
    gone: bool = False
    quiet: bool = False
    silence: Silence | None = None
    """None on this host: the end of a pipe tells all."""
    heard: bool = False
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    ranks: list[int] = field(default_factory=list)


class Supervisor:
    """Runs one job. It takes the whole process for itself: signals, and every child at the end.

    Args:
        job: what to run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._name = f"zoo-{uuid.uuid4().hex[:12]}"  # no process number: in a container that is always the same
        self._nodes: list[_Node] = []
        self._failures: list[Failure] = []
        self._selector = selectors.DefaultSelector()
        self._wakeup = os.pipe()
        self._stop_at: float | None = None
        self._late_at: float | None = None
        self._stopped_by: int | None = None
        self._finished: tuple[float, _Node, int] | None = None  # when a rank was the first to end with 0, and which
        self._generation = 0
        self._open_lines: dict[tuple[int, str], str] = {}
        self._telling = threading.Lock()
        self._beats: Beats | None = None

    def run(self) -> int:
        """Until all is over. Returns the exit code: 0, that of what failed first, or 128 + the signal that ended it."""
        processes.adopt_orphans()
        for end in self._wakeup:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda *_: None)
        self._selector.register(self._wakeup[0], selectors.EVENT_READ)
        try:
            self._start_agents()
            while self._run_generation():
                self._generation += 1
            return self._end()
        finally:
            if self._beats is not None:
                self._beats.close()
            left = processes.end_descendants(0.0)
            if left:
                _print(f"zoo launch: processes {left} on this host cannot be ended.\n")

    # -- agents -------------------------------------------------------------------------------------------------------

    def _start_agents(self) -> None:
        began = time.monotonic()
        for host, slots in self._job.hosts.items():
            command = self._job.agent_command(host)
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                raise ValueError(
                    f"host {host} is reached by {command[0]!r}, which cannot be started ({error.strerror}); give --ssh."
                ) from None
            node = _Node(host, list(slots), process)
            if not self._job.is_local(host):
                node.silence = Silence(self._job.lost_s)
            self._nodes.append(node)
            if process.stdout is None:
                raise AssertionError("an agent has no pipe.")
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ, node)
        remote = [node for node in self._nodes if node.silence is not None]
        if remote:
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a launcher that is stopped counts as gone
            self._beats = Beats(self._job.lost_s / 5, lambda: self._beat(remote))
        while any(node.hello is None and not node.gone for node in self._nodes) and self._stopped_by is None:
            left = began + self._job.start_s - time.monotonic()
            if left <= 0:
                for node in self._nodes:
                    if node.hello is None and not node.gone:
                        self._fail(node, f"it has not answered within {self._job.start_s:g} s", code=1)
                        self._lose(node)
                break
            self._turn(left)
        self._compare()

    def _compare(self) -> None:
        """Hosts whose versions or clocks are not those of the first are named."""
        told = [node for node in self._nodes if node.hello is not None]
        for node in told[1:]:
            here, there = told[0].hello or {}, node.hello or {}
            for name in _COMPARED:
                if here[name] != there[name]:
                    self._fail(node, f"it has {name} {there[name]}, and {told[0].host} has {here[name]}", code=2)
            if abs(node.skew_s - told[0].skew_s) > self._job.max_skew_s:
                ahead = node.skew_s - told[0].skew_s
                self._fail(node, f"its clock is {ahead:+.1f} s off that of {told[0].host}; set both by NTP", code=2)

    def _beat(self, nodes: list[_Node]) -> None:
        """From a thread of its own, so that a terminal which takes nothing more does not end a job."""
        for node in nodes:
            if node.process.stdin is not None and select.select([], [node.process.stdin], [], 0)[1]:
                self._tell(node, {"beat": True})

    def _tell(self, node: _Node, command: dict[str, Any]) -> None:
        if not node.gone and node.process.stdin is not None:
            with contextlib.suppress(OSError), self._telling:
                node.process.stdin.write((json.dumps(command) + "\n").encode())
                node.process.stdin.flush()

    def _lose(self, node: _Node) -> None:
        """Its agent is gone, or counts as gone."""
        node.gone, node.running = True, False
        if node.process.stdout is not None and not node.process.stdout.closed:
            self._selector.unregister(node.process.stdout)
            node.process.stdout.close()
        if node.process.returncode is None:
            processes.send(signal.SIGKILL, [*processes.descendants(node.process.pid), node.process.pid])

    # -- a generation -------------------------------------------------------------------------------------------------

    def _run_generation(self) -> bool:
        """Returns whether there is to be another."""
        if not self._failures and self._stopped_by is None:
            self._begin([node for node in self._nodes if not node.gone])
        while any(node.running for node in self._nodes):
            self._turn(self._wait_s())
            self._decide()
        if not self._failures or self._stopped_by is not None or self._generation >= self._job.max_restarts:
            return False
        alive = [node for node in self._nodes if not node.gone]
        if len(alive) < (self._job.min_nodes or len(self._job.hosts)):
            return False
        _print(report.screen(self._failures))
        names = ", ".join(node.host for node in alive)
        _print(f"zoo launch: restart {self._generation + 1} of {self._job.max_restarts}, on {names}.\n")
        self._failures, self._stop_at, self._late_at, self._finished = [], None, None, None
        return True

    def _begin(self, nodes: list[_Node]) -> None:
        job, here = self._job, sum(len(node.slots) for node in nodes)
        world, first = here * job.nodes, here * job.node
        address = job.address or ("127.0.0.1" if len(nodes) == 1 else nodes[0].host.rpartition("@")[2])
        port = job.port or free_port()
        variables = {
            **job.environment, "MASTER_ADDR": address, "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self._name, "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
            # The store is rank 0's, whatever a torchrun says in which this launcher runs.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }  # fmt: skip
        for place, node in enumerate(nodes):
            ranks = list(range(first, first + len(node.slots)))
            first += len(ranks)
            start = Start(
                generation=self._generation, command=list(job.command), ranks=ranks, world=world,
                node=place + job.node, nodes=len(nodes) * job.nodes, environment=variables, grace_s=job.grace_s,
                log_dir=job.log_dir, cores=job.cores, slots=node.slots if job.devices else None, hang_s=job.hang_s,
                local_rank=job.local_rank,
                shown=ranks if job.shown is None else [rank for rank in ranks if rank in job.shown],
                port=port if place + job.node == 0 else None,
            )  # fmt: skip
            node.running, node.quiet, node.ranks, node.done, node.reports = True, False, ranks, set(), {}
            self._tell(node, {"start": asdict(start)})

    def _wait_s(self) -> float | None:
        times = [at for at in (self._stop_at, self._late_at) if at is not None]
        if self._finished is not None and self._stop_at is None:
            times.append(self._finished[0] + self._job.finish_s)
        return processes.wait_s(times)

    def _decide(self) -> None:
        now = time.monotonic()
        running = [node for node in self._nodes if node.running]
        if self._finished is not None and self._stop_at is None and now >= self._finished[0] + self._job.finish_s:
            others = [rank for node in running for rank in node.ranks if rank not in node.done]
            _, node, rank = self._finished
            self._fail(node, f"it ended with exit code 0 {self._job.finish_s:g} s ago, while ranks {others} still run; "
                       "give --finish-s if they need longer", code=1, rank=rank)  # fmt: skip
        if running and self._job.hang_s is not None and self._stop_at is None and all(node.quiet for node in running):
            for node in running:
                self._tell(node, {"stacks": True})
            self._fail(running[0], f"no rank has printed anything for {self._job.hang_s:g} s (--hang-s); the stacks of "
                       "all ranks are above", code=1)  # fmt: skip
        if self._stop_at is not None and now >= self._stop_at and self._late_at is None:
            self._stop(signal.SIGTERM, None)
        if self._late_at is not None and now >= self._late_at:
            for node in running:
                self._fail(node, "its agent does not answer", code=1)
                self._lose(node)

    def _stop(self, number: int, grace_s: float | None) -> None:
        for node in self._nodes:
            self._tell(node, {"stop": number, "grace_s": grace_s})
        wait = self._job.grace_s if grace_s is None else grace_s
        self._stop_at, self._late_at = time.monotonic(), time.monotonic() + wait + _LATE_S

    def _end(self) -> int:
        for node in self._nodes:
            self._tell(node, {"quit": True})
        until = time.monotonic() + _LATE_S
        while any(not node.gone for node in self._nodes) and time.monotonic() < until:
            self._turn(0.1)
        for key in list(self._open_lines):
            self._show(*key, "\n")
        failures = [one for one in self._failures if not (self._stopped_by and (one.stopped or one.lost))]
        if failures:
            _print(report.screen(self._failures))
        if self._stopped_by is not None:
            _print(f"zoo launch: the job was ended by {signal.Signals(self._stopped_by).name}.\n")
            codes = {one.code for one in self._failures if one.code > 0}
            return codes.pop() if len(codes) == 1 else 128 + self._stopped_by
        return report.exit_code(report.cause(self._failures)) if self._failures else 0

    # -- events -------------------------------------------------------------------------------------------------------

    def _turn(self, wait_s: float | None) -> None:
        listened = [(node, node.silence) for node in self._nodes if node.silence is not None and not node.gone]
        for _, silence in listened:
            wait_s = silence.beat_s if wait_s is None else min(wait_s, silence.beat_s)
        for key, _ in self._selector.select(None if wait_s is None else min(wait_s, processes.LONGEST_S)):
            if key.data is None:
                self._read_signals()
            else:
                self._read(key.data)
        ended = dict(processes.reap())
        for node in self._nodes:
            if node.process.pid in ended:
                node.process.returncode = ended[node.process.pid]
                self._read(node)
                self._agent_ended(node)
        for node, silence in listened:
            heard, node.heard = node.heard or node.hello is None, False
            if silence.turn(heard) and not node.gone:
                self._fail(node, f"nothing has been heard of it for {silence.lost_s:g} s (--lost-s): it is off, or a "
                           "cable is", code=1)  # fmt: skip
                self._lose(node)

    def _agent_ended(self, node: _Node) -> None:
        code = -signal.SIGKILL if node.process.returncode is None else node.process.returncode
        if not node.gone and (node.running or node.hello is None):
            what = "its agent" if self._job.is_local(node.host) else "the connection to its agent"
            said = f"{what} ended before its ranks did ({report.code_of(code)})"
            known = None if node.hello is not None or self._job.is_local(node.host) else self._job.why_not_begun(code)
            self._fail(node, known or said, code=code or 1)
        self._lose(node)

    def _read_signals(self) -> None:
        for number in os.read(self._wakeup[0], 4096):
            if number == signal.SIGQUIT:
                for node in self._nodes:
                    self._tell(node, {"stacks": True})
            elif number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                again = self._stopped_by is not None
                self._stopped_by = self._stopped_by or number
                self._stop(number if number == signal.SIGINT else signal.SIGTERM, 0.0 if again else None)

    def _read(self, node: _Node) -> None:
        if node.gone or node.process.stdout is None:
            return
        try:
            while found := os.read(node.process.stdout.fileno(), 1 << 16):
                node.heard = True
                *lines, node.partial = (node.partial + found).split(b"\n")
                for line in lines:
                    if line.startswith(b"{"):  # all else, and some of that, is what a shell prints when it starts
                        with contextlib.suppress(json.JSONDecodeError):
                            self._take(node, json.loads(line))
        except BlockingIOError:
            return
        self._selector.unregister(node.process.stdout)  # its output has ended; it will too
        node.process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.process.wait(_LATE_S)
        self._agent_ended(node)

    def _take(self, node: _Node, event: dict[str, Any]) -> None:
        rank = event.get("rank", -1)
        if "hello" in event:
            node.hello, node.skew_s = event["hello"], event["hello"]["time"] - time.time()
        elif "text" in event:
            self._show(rank, event["stream"], event["text"])
        elif "report" in event:
            node.reports[rank] = event["report"]
        elif "stacks" in event:
            _print(f"zoo launch: rank {rank} on host {node.host}:\n{event['stacks'].rstrip()}\n")
        elif "exit" in event:
            self._take_exit(node, rank, event)
        elif "problem" in event:
            self._fail(node, event["problem"], code=event["code"])
        elif "killed" in event:
            self._fail(node, f"its agent was {report.code_of(-event['killed'])}", code=-event["killed"])
            node.running = False
        elif "quiet" in event:
            node.quiet = event["quiet"]
        elif "ignored" in event:
            ranks = ", ".join(map(str, event["ignored"]))
            _print(
                f"zoo launch: ranks {ranks} on host {node.host} were killed, because they had not ended "
                f"{self._job.grace_s:g} s after they were told to.\n"
            )
        elif "ended" in event:
            node.running = False
        if event.get("left"):
            _print(f"zoo launch: processes {event['left']} on host {node.host} cannot be ended.\n")

    def _take_exit(self, node: _Node, rank: int, event: dict[str, Any]) -> None:
        node.done.add(rank)
        code = event["exit"]
        if code == 0:
            if self._finished is None:
                self._finished = (time.monotonic(), node, rank)
            return
        found = report.of_exit(
            node.host, rank, code, event["time"], report=node.reports.get(rank), last=event["last"],
            stopped=event["stopped"],
        )  # fmt: skip
        if found.lost and self._finished is not None:
            moment, first, number = self._finished
            before = "it had ended with exit code 0 before the others had finished"
            self._fail(first, before, code=1, rank=number, moment=found.time - (time.monotonic() - moment))
        self._failed(found)

    def _fail(
        self, node: _Node, summary: str, *, code: int, moment: float | None = None, rank: int | None = None
    ) -> None:  # fmt: skip
        moment = time.time() if moment is None else moment
        self._failed(Failure(host=node.host, time=moment, summary=summary, code=code, rank=rank))

    def _failed(self, failure: Failure) -> None:
        self._failures.append(failure)
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._job.settle_s

    def _show(self, rank: int, stream: str, text: str) -> None:
        """As it came where one rank is shown; else whole lines with the rank before them."""
        file = sys.stderr if stream == "stderr" else sys.stdout
        if self._job.shown is not None and len(self._job.shown) == 1:
            _print(text, file)
            return
        *lines, rest = (self._open_lines.pop((rank, stream), "") + text).split("\n")
        if "\r" in rest:  # a bar that moves: where it is now
            line, _, rest = rest.rpartition("\r")
            lines.append(line)
        if len(rest) > _OPEN:
            lines, rest = [*lines, rest], ""
        if rest:
            self._open_lines[rank, stream] = rest
        shown = (line.rstrip("\r").rpartition("\r")[2] if "\r" in line else line for line in lines)
        _print("".join(f"[rank {rank}] {line}\n" for line in shown), file)


def _print(text: str, file: Any = None) -> None:
    file = sys.stderr if file is None else file
    rest = memoryview(text.encode(errors="surrogateescape"))  # bytes of ranks as they came, whatever they mean
    with contextlib.suppress(OSError):  # nobody reads it any more; what has to end ends all the same
        while True:
            try:
                file.flush()
                if not rest:
                    return
                rest = rest[file.buffer.write(rest) :]
            except BlockingIOError as error:  # another program has made the terminal, or pipe, one that does not wait
                rest = rest[error.characters_written :]
                select.select([], [file], [])
