"""What is to be started: a job, as its supervisor takes it."""

from __future__ import annotations

import math
import os
import random
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

LOCAL = ("localhost", "127.0.0.1")
_NO_FOLDER, _NO_PROGRAM = 97, 127
"""Exit codes of the command line that starts an agent; the second one is the shell's."""
_PORTS = range(20_000, 32_768)  # below those that Linux gives to connections


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command on the slots of hosts.

    Raises:
        ValueError: numbers that cannot be.
    """

    command: Sequence[str]
    """SCRIPT, "-m" MODULE or "--no-python" PROGRAM, and its arguments."""
    hosts: Mapping[str, Sequence[int]]
    """Host → slots, ranks in this order. The one host "localhost" is started without ssh."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For every rank, on top of what its host has."""
    devices: bool = False
    """Slots are devices: CUDA_VISIBLE_DEVICES of a host is its slots."""
    cores: str | None = None
    """Cores of their own for ranks: "0-3,8", or "all"; None: as they are."""
    local_rank: bool = False
    """Scripts get ``--local_rank=N`` before their arguments, as DeepSpeed's launcher gives it."""
    log_dir: str | None = None
    """Folder in which every rank has a folder with stdout.log and stderr.log."""
    shown: Sequence[int] | None = (0,)
    """Ranks whose output is on the screen; None: all."""
    address: str | None = None
    port: int | None = None
    """Where rank 0 is; by default the first host, and a free port."""
    node: int = 0
    nodes: int = 1
    """Where a launcher is started on every node by something else: which this is, of how many; each with one host and
    as many slots, and with ``address`` and ``port``."""
    ssh: str = "ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=10"
    """Command that is given a host and a command line."""
    python: str = sys.executable
    """On the other hosts."""
    max_restarts: int = 0
    min_nodes: int | None = None
    """With restarts: go on with so few hosts; None: all of them."""
    start_s: float = 60.0
    """A host that has not answered by then does not answer."""
    settle_s: float = 1.0
    """From the first failure to the end of all others: what else fails in that time tells what was first."""
    grace_s: float = 6.0
    """From the signal that ends ranks to SIGKILL."""
    finish_s: float = 300.0
    """How long ranks may go on after one has ended with exit code 0."""
    hang_s: float | None = None
    """After so long without output of any rank the stacks of all are printed, and the job ends."""
    lost_s: float = 10.0
    """A host over ssh of which nothing has been heard for so long is lost; its agent, which hears nothing, ends all."""
    max_skew_s: float = 5.0
    """By which clocks of hosts may differ."""

    def __post_init__(self) -> None:
        if not self.command or not self.hosts or not all(self.hosts.values()):
            raise ValueError("a job needs a script, and hosts with slots.")
        for name in ("start_s", "finish_s", "hang_s", "lost_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; give seconds above 0.")
        if not (0 <= self.grace_s < math.inf and 0 <= self.settle_s < math.inf and self.max_restarts >= 0):
            raise ValueError("grace_s, settle_s and max_restarts have to be numbers from 0 on.")
        if self.min_nodes is not None and not 1 <= self.min_nodes <= len(self.hosts):
            raise ValueError(f"min_nodes is {self.min_nodes}, and there are {len(self.hosts)} hosts.")
        if self.min_nodes is not None and self.max_restarts == 0:
            raise ValueError(
                f"min_nodes is {self.min_nodes} and max_restarts 0, so that nothing starts again; give "
                "both, or neither."
            )
        if not 0 <= self.node < self.nodes:
            raise ValueError(f"node {self.node} is none of {self.nodes} nodes; give 0 to {self.nodes - 1}.")
        if self.nodes > 1 and (len(self.hosts) > 1 or self.address is None or self.port is None):
            raise ValueError(
                f"a launcher on each of {self.nodes} nodes starts ranks on its own host, and has to know where rank 0 "
                "is; give --master-addr and --master-port, or a file of hosts to one launcher."
            )
        world = sum(map(len, self.hosts.values())) * self.nodes
        if wrong := [rank for rank in self.shown or () if not 0 <= rank < world]:
            raise ValueError(f"rank {wrong[0]} is to be shown, and ranks are 0 to {world - 1}; give some of these.")
        try:
            words = shlex.split(self.ssh)
        except ValueError as error:
            raise ValueError(
                f"the command for other hosts is {self.ssh!r}, which no shell can read ({error}); correct --ssh."
            ) from None
        if not words:
            raise ValueError("the command for other hosts is empty; give --ssh such as 'ssh -p 2222', or leave it out.")
        self._check_hosts()
        if self.port is not None and not 0 < self.port < 65_536:
            raise ValueError(f"the port of rank 0 is {self.port}; give one from 1 to 65535.")

    def _check_hosts(self) -> None:
        """Each can be given to ssh, and the first be reached by the others."""
        for host in self.hosts:
            if host.startswith("-"):
                raise ValueError(f"{host!r} is no name of a host: ssh would take it for an option of its own.")
        fewer = self.max_restarts > 0 and self.min_nodes not in (None, len(self.hosts))
        first = list(self.hosts)[: None if fewer else 1]  # one of these will be the first
        others = [host for host in self.hosts if host not in LOCAL and not host.startswith("127.")]
        if self.address is None and "localhost" in first and others:
            raise ValueError(
                "rank 0 would be on 'localhost', by which every host means itself; write the name by which "
                f"{', '.join(others)} can reach it, or give --master-addr."
            )

    def preflight(self) -> Job:
        """What is started before it, once on every host: :mod:`zoo.comm.preflight`.

        Raises:
            ValueError: a launcher on each node knows no names of the others.
        """
        if self.nodes > 1:
            raise ValueError(
                "--check looks at the hosts of one launcher; where one is started on every node, srun or mpirun can "
                "run `python -m zoo.comm.preflight HOST,HOST,...` as a job of its own."
            )
        return replace(
            self, command=["-m", "zoo.comm.preflight", ",".join(self.hosts), "--seconds", f"{self.start_s:g}"],
            hosts={host: slots[:1] for host, slots in self.hosts.items()}, local_rank=False, log_dir=None,
            max_restarts=0, min_nodes=None, hang_s=None, shown=(0,), cores=None,
        )  # fmt: skip

    def is_local(self, host: str) -> bool:
        """Whether it is started without ssh."""
        return host == "localhost" or (len(self.hosts) == 1 and host in (*LOCAL, socket.gethostname()))

    def agent_command(self, host: str) -> list[str]:
        """What starts the agent of a host. Variables go through its input, not through the command line."""
        module = ["-u", "-m", "zoo.launch.agent"]
        if self.is_local(host):
            return [sys.executable, *module]
        path = os.environ.get("PYTHONPATH")
        found = ["env", f"PYTHONPATH={path}"] if path else []
        command = [*found, self.python, *module, "--lost-s", f"{self.lost_s:g}"]
        line = f"cd {shlex.quote(os.getcwd())} || exit {_NO_FOLDER}; exec {shlex.join(command)}"
        return [*shlex.split(self.ssh), host, line]

    def why_not_begun(self, code: int) -> str | None:
        """What the exit code of :meth:`agent_command` says, where no agent has been heard of; None: nothing."""
        if code == _NO_FOLDER:
            return f"it has no folder {os.getcwd()!r}; mount it there, or start from a folder that every host has"
        if code == _NO_PROGRAM:
            return f"it has no {self.python}; every host needs this Python, with zoo"
        return None


def gpus(variables: Mapping[str, str]) -> list[int]:
    """Numbers of NVIDIA's devices of this host, without asking a driver: CUDA_VISIBLE_DEVICES, or /dev/nvidia0, …"""
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return list(range(len([one for one in visible.split(",") if one.strip() not in ("", "-1")])))
    found = [re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*")]
    return sorted(int(match[1]) for match in found if match)


def free_port() -> int:
    """A port that nobody listens on here, out of those that connections do not get by themselves."""
    for port in random.SystemRandom().sample(_PORTS, 50):
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
            return port
    raise ValueError("none of 50 ports from 20000 to 32767 is free on this host; give one with --master-port.")
