"""Drawn kills of jobs on several hosts: of what, by which signal, at which moment; and what has to be true after."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.real import netns
from tests.launch.jobs import Launched, alive, basics, hear_signals, launched, new_mark
from tests.launch.remote import HOST

REMOTE = Path(__file__).with_name("remote.py")
VICTIMS = ("rank", "agent", "keeper", "ssh", "sshd", "supervisor")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
MOMENTS = ("start", "step", "save")
WITHIN_S = 10.0
"""After a kill nothing of the job may live longer."""

# Sums over all ranks by way of rank 0, and a file that is written slowly now and then: no torch, so that a kill costs
# little. Each rank has a child, a grandchild, and a daemon that nobody waits for.
SCRIPT = """
import os, pickle, signal, socket, subprocess, sys, time
folder, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def moment(name):
    with open(f"{folder}/moment.{rank}.new", "w") as file:
        file.write(name)
    os.replace(f"{folder}/moment.{rank}.new", f"{folder}/moment.{rank}")

subprocess.Popen(["sh", "-c", "setsid sleep 300 & setsid sleep 300 & sleep 300"], start_new_session=True)
subprocess.Popen(["sh", "-c", "sleep 300; true"])
time.sleep(0.4)
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
others = []
if rank == 0:
    server = socket.create_server(("", address[1]))
    others = [server.accept()[0] for _ in range(world - 1)]
else:
    while True:
        try:
            others = [socket.create_connection(address, timeout=100)]
            break
        except ConnectionRefusedError:
            time.sleep(0.02)

def total(value):
    if rank == 0:
        value += sum(receive(one) for one in others)
    for one in others:
        one.sendall(value.to_bytes(8, "big"))
    return value if rank == 0 else receive(others[0])

def receive(one):
    found = one.recv(8, socket.MSG_WAITALL)
    if len(found) < 8:
        raise ConnectionError("Connection closed by peer")
    return int.from_bytes(found, "big")

for step in range(4000):
    moment("step")
    time.sleep(0.05)
    assert total(rank) == world * (world - 1) // 2
    if step % 4 == 3:
        moment("save")
        with open(f"{folder}/checkpoint.{rank}", "w") as file:
            for _ in range(10):
                file.write("x" * 1000)
                file.flush()
                time.sleep(0.03)
"""


@dataclass
class Cluster:
    """Hosts that a stand-in for ssh reaches."""

    hosts: Sequence[str]
    port: int
    mark: str
    servers: list[subprocess.Popen[str]] = field(default_factory=list)
    before: Sequence[str] = ()
    """What the launcher itself is started by."""

    def arguments(self, folder: Path, slots: int = 1) -> list[str]:
        """Of ``zoo launch``, for these hosts."""
        (folder / "hosts").write_text("".join(f"{name} slots={slots}\n" for name in self.hosts))
        return ["--ssh", f"{sys.executable} -IS {REMOTE} {self.port}", "-H", str(folder / "hosts")]

    def serve(self, folder: Path, hosts: Sequence[str], before: Sequence[str] = ()) -> None:
        """Start what answers for these hosts, with an environment of its own."""
        environment = {"PATH": os.environ["PATH"], **basics(folder, self.mark)}
        server = subprocess.Popen(
            [*before, sys.executable, "-IS", str(REMOTE), "serve", str(self.port), *hosts], env=environment,
            stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=hear_signals,
        )  # fmt: skip
        self.servers.append(server)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"

    def left(self, job: Launched) -> dict[int, str]:
        """Processes of the job that live: the launcher and all that follows from it."""
        aside = {server.pid for server in self.servers}
        return {pid: line for pid, line in alive(job.mark).items() if pid not in aside}


@contextlib.contextmanager
def cluster(folder: Path, hosts: Sequence[str]) -> Iterator[Cluster]:
    """Hosts that are addresses of this one."""
    with socket.socket() as found:
        found.bind((hosts[0], 0))
        port = int(found.getsockname()[1])
    made = Cluster(hosts, port, new_mark())
    try:
        made.serve(folder, hosts)
        yield made
    finally:
        close(made)


@contextlib.contextmanager
def apart(folder: Path, count: int) -> Iterator[Cluster]:
    """Hosts that are network namespaces; the launcher is on the first. Its mark is their name, too."""
    mark = new_mark()
    made = Cluster([netns.address(number) for number in range(count)], 2200, mark, before=netns.inside(mark, 0))
    with netns.namespaces(mark, count):
        try:
            for number, host in enumerate(made.hosts):
                made.serve(folder, [host], netns.inside(mark, number))
            yield made
        finally:
            close(made)


def close(made: Cluster) -> None:
    for server in made.servers:
        server.kill()
        server.communicate()


@dataclass(frozen=True)
class Kill:
    """What is drawn."""

    victim: str
    signal: str
    moment: str
    stubborn: bool
    """Ranks ignore SIGTERM."""
    chance: random.Random

    @classmethod
    def draw(cls, number: int, seed: int | None = None) -> Kill:
        """The kinds in turns, so that each comes as often; the rest by chance."""
        victim = VICTIMS[number % 6]
        name, moment = SIGNALS[number // 6 % 3], MOMENTS[number // 18 % 3]
        chance = random.Random(seed)
        ignored = victim == "rank" and name == "SIGTERM"  # by a stubborn rank: it would go on, and so would the job
        return cls(victim, name, moment, chance.random() < 0.2 and not ignored, chance)


@dataclass(frozen=True)
class Process:
    """One that may be killed."""

    kind: str
    pid: int
    host: str
    rank: int = -1


def processes(made: Cluster, job: Launched) -> list[Process]:
    """All of the job that are of a kind, as far as they are there yet."""
    lines = alive(job.mark)
    parents = dict[int, int]()
    for pid in lines:
        with contextlib.suppress(OSError, IndexError):
            parents[pid] = job.above(pid)
    found = [Process("supervisor", job.process.pid, "")]
    servers = {server.pid for server in made.servers}

    def is_agent(pid: int | None) -> bool:
        return "-m zoo.launch.agent" in lines.get(pid or 0, "") and "ssh" not in lines.get(pid or 0, "")

    for pid, parent in parents.items():
        line = lines[pid]
        if str(REMOTE) in line and parent == job.process.pid and "zoo.launch.agent" in line:
            found.append(Process("ssh", pid, line.split(f"{REMOTE} ")[1].split()[1]))
        elif f"{REMOTE} serve" in line and parent in servers:
            below = next((child for child, above in parents.items() if above == pid), pid)
            found.append(Process("sshd", pid, _variable(below, HOST)))
        elif is_agent(pid) and str(REMOTE) not in line:
            above, grand = parent, parents.get(parent)
            kind = "agent" if is_agent(above) and not is_agent(grand) else "keeper" if not is_agent(above) else ""
            if kind:
                found.append(Process(kind, pid, _variable(pid, HOST)))
        elif "-m zoo.launch.worker" in line:
            found.append(Process("rank", pid, _variable(pid, HOST), int(_variable(pid, "RANK") or -1)))
    return found


def _variable(pid: int, name: str) -> str:
    """Of a process's environment; "" where it is not, or not there yet."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(f"{name}=".encode()):
                return line.partition(b"=")[2].decode()
    return ""


def moment_of(folder: Path) -> str:
    """What the job is at."""
    names = []
    for file in folder.glob("moment.*"):
        with contextlib.suppress(OSError):
            names.append(file.read_text())
    return "save" if "save" in names else "step" if "step" in names else "start"


def wait(what: Callable[[], object], job: Launched, timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not what():
        if job.process.poll() is not None or time.monotonic() > until:
            raise AssertionError(f"it does not come so far: {job.finish(20)}")
        time.sleep(0.005)


def kill(made: Cluster, folder: Path, drawn: Kill) -> tuple[str, str, float]:
    """Start a job, end one of its processes and look. Returns which, at which moment, and the seconds until all was
    gone."""
    arguments = [*made.arguments(folder), "SCRIPT", str(folder), "stubborn" if drawn.stubborn else "-"]
    with launched(folder, *arguments, script=SCRIPT, mark=made.mark, before=made.before) as job:
        chosen = _choose(made, job, folder, drawn)
        moment, began = moment_of(folder), time.monotonic()
        os.kill(chosen.pid, signal.Signals[drawn.signal])
        left = made.left(job)
        while left and time.monotonic() < began + WITHIN_S:
            time.sleep(0.02)
            left = made.left(job)
        took_s = time.monotonic() - began
        told = (drawn, chosen, moment, moment_of(folder))
        if left:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        said = job.finish(10)
    assert not left, (told, left, said)
    assert job.process.returncode != 0, (told, said)
    if chosen.kind != "supervisor":
        last = said.splitlines()[-20:]
        assert any(re.search(cause(chosen), line) for line in last), (told, said)
        if chosen.kind == "rank" and drawn.signal == "SIGKILL":
            assert job.process.returncode == 128 + signal.SIGKILL, (told, said)
    return f"{chosen.kind} {drawn.signal}", moment, took_s


def _choose(made: Cluster, job: Launched, folder: Path, drawn: Kill) -> Process:
    """Wait for the drawn moment and take one of the kind that was drawn."""
    found: list[Process] = []

    def there() -> bool:
        found[:] = [one for one in processes(made, job) if one.kind == drawn.victim]
        return bool(found)

    if drawn.moment == "start":
        if drawn.victim == "supervisor":
            time.sleep(drawn.chance.uniform(0.0, 2.0))
        wait(there, job)
        time.sleep(drawn.chance.uniform(0.0, 0.4))
        there()
    else:
        wait(lambda: moment_of(folder) == drawn.moment, job)
        there()
        time.sleep(drawn.chance.uniform(0.0, 0.05))
    return drawn.chance.choice(found)


def cause(chosen: Process) -> str:
    """The line that has to be among the last."""
    host = re.escape(chosen.host) or r"\S+"
    if chosen.kind == "rank":
        return (
            rf"zoo launch: the cause: rank {chosen.rank} on host {host}: (killed by SIG|KeyboardInterrupt|exit code )"
        )
    agent = r"its agent (was killed by|got) SIG|the connection to its agent ended before its ranks did"
    return rf"zoo launch: the cause: host {host}: ({agent})"


def ours(left: dict[int, str]) -> dict[int, str]:
    """Without the stand-in for sshd, which does not notice that a cable is cut."""
    return {pid: line for pid, line in left.items() if f"{REMOTE} serve" not in line}
