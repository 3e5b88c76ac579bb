"""``deepspeed.launcher.multinode_runner``: command lines with which pdsh, MPI launchers and SLURM start a job.

Ranks of MPI and SLURM take their place from the variables of those (:mod:`zoo.comm.launch`); pdsh starts one
``zoo launch`` on each host.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

_PLAIN = re.compile(r"[\w@%+=:,./-]*")
Pool = Mapping[str, Any]
"""Host → number of slots, or their numbers."""


def slots_of(pool: Pool) -> dict[str, int]:
    """Host → number of slots."""
    return {host: slots if isinstance(slots, int) else len(slots) for host, slots in pool.items()}


class MultiNodeRunner(ABC):
    """One way to start processes on many hosts.

    Args:
        args: what ``parse_args`` gave.
        world_info_base64: hosts and slots, as ``encode_world_info`` writes them.
    """

    tool = ""
    """The program that has to be there."""

    def __init__(self, args: Namespace, world_info_base64: str) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64
        self.user_arguments: list[str] = self.parse_user_args()
        self.user_script: str = args.user_script
        self.exports: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        """As ``exports``, without the quotes that a shell needs."""
        self.validate_args()

    @abstractmethod
    def backend_exists(self) -> bool:
        """Whether its program is here."""

    @abstractmethod
    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Pool) -> Any:
        """The command line, as a list."""

    def add_export(self, key: str, var: str) -> None:
        """Have ranks see a variable; a value with signs that a shell reads is quoted."""
        name, value = key.strip(), var.strip()
        self.variables[name] = value
        self.exports[name] = value if _PLAIN.fullmatch(value) else f'"{value}"'

    def parse_user_args(self) -> list[str]:
        """The arguments of the script."""
        return list(self.args.user_args)

    @property
    def name(self) -> str:
        """Of the class."""
        return type(self).__name__

    def validate_args(self) -> None:
        """Refuse what this way cannot do.

        Raises:
            ValueError: hosts are given that it does not start.
        """
        if not self.user_script:
            raise ValueError(f"{self.name} has no script to start; give one.")

    def _script(self) -> list[str]:
        python = [] if self.args.no_python else [sys.executable, "-u"] + ["-m"] * bool(self.args.module)
        return [*python, self.user_script, *self.user_arguments]

    def _launcher_args(self) -> list[str]:
        return shlex.split(self.args.launcher_args or "")


class PDSHRunner(MultiNodeRunner):
    """pdsh: one launcher on each host, which takes its place from ``%n``. ``get_cmd`` gives the command, the one that
    ends all, and the environment."""

    tool = "pdsh"

    def backend_exists(self) -> bool:
        return shutil.which("pdsh") is not None

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Pool
    ) -> tuple[list[str], list[str], MutableMapping[str, str]]:
        slots = slots_of(active_resources)
        if len(set(slots.values())) > 1:
            raise ValueError(f"pdsh starts the same on every host, and these have different slots: {slots}.")
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            environment["PDSH_SSH_ARGS_APPEND"] = f"-p {self.args.ssh_port}"
        hosts = ",".join(slots)
        words = [sys.executable, "-m", "zoo.cli", "launch", f"--num_nodes={len(slots)}", "--node_rank=%n"]
        words += [f"--ranks={next(iter(slots.values()))}", f"--master_port={self.args.master_port}"]
        words += [f"--master_addr={self.args.master_addr or next(iter(slots))}"]
        words += ["-m"] * bool(self.args.module) + ["--no-python"] * bool(self.args.no_python)
        line = [f"export {name}={value};" for name, value in self.exports.items()]
        line += [
            f"cd {shlex.quote(os.path.abspath('.'))};",
            shlex.join([*words, self.user_script, *self.user_arguments]),
        ]
        begin = ["pdsh", "-S", "-f", "1024", "-w", hosts, *self._launcher_args()]
        stop = ["pdsh", "-S", "-f", "1024", "-w", hosts, "pkill", "-f", self.user_script]
        return [*begin, " ".join(line)], stop, environment


class _Mpi(MultiNodeRunner):
    tool = "mpirun"

    def __init__(self, args: Namespace, world_info_base64: str, resource_pool: Pool) -> None:
        self.resource_pool = resource_pool
        super().__init__(args, world_info_base64)

    def backend_exists(self) -> bool:
        return shutil.which(self.tool) is not None

    def validate_args(self) -> None:
        if self.args.include or self.args.exclude:
            raise ValueError(f"{self.name} starts ranks on whole hosts; leave --include and --exclude out.")

    def _even(self, pool: Pool) -> tuple[int, int]:
        """All ranks, and those of each host.

        Raises:
            ValueError: hosts differ.
        """
        slots = slots_of(pool)
        if len(set(slots.values())) > 1:
            raise ValueError(f"{self.name} needs hosts with as many slots each, and these differ: {slots}.")
        return sum(slots.values()), next(iter(slots.values()))

    def _meeting(self, pool: Pool) -> dict[str, str]:
        address = self.args.master_addr or next(iter(pool))
        return {**self.variables, "MASTER_ADDR": address, "MASTER_PORT": str(self.args.master_port)}


class OpenMPIRunner(_Mpi):
    """``mpirun`` of Open MPI."""

    tool = "ompi_info"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Pool) -> list[str]:
        more = self._launcher_args()
        device = [] if "btl_tcp_if_include" in more else ["--mca", "btl_tcp_if_include", "eth0"]
        hosts = ",".join(f"{host}:{slots}" for host, slots in slots_of(active_resources).items())
        found = ["mpirun", "-n", str(sum(slots_of(active_resources).values())), "-host", hosts]
        found += ["--mca", "btl", "^openib", *device, *more]
        for name, value in self._meeting(active_resources).items():
            found += ["-x", f"{name}={value}"]
        return [*found, *self._script()]


class MPICHRunner(_Mpi):
    """``mpirun`` of MPICH."""

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Pool) -> list[str]:
        ranks, each = self._even(active_resources)
        found = ["mpirun", "-n", str(ranks), "-ppn", str(each), "-hosts", ",".join(active_resources)]
        found += self._launcher_args()
        for name, value in self._meeting(active_resources).items():
            found += ["-genv", name, value]
        return [*found, *self._script()]


class IMPIRunner(MPICHRunner):
    """``mpirun`` of Intel MPI, whose options are MPICH's."""


class MVAPICHRunner(_Mpi):
    """``mpirun`` of MVAPICH2, which wants a file of hosts."""

    tool = "mpiname"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Pool) -> list[str]:
        from zoo.deepspeed.adapters.utilities.launcher import MVAPICH_TMP_HOSTFILE

        ranks, each = self._even(active_resources)
        Path(MVAPICH_TMP_HOSTFILE).write_text("".join(f"{host}\n" for host in active_resources), encoding="utf-8")
        found = ["mpirun", "-np", str(ranks), "-ppn", str(each), "--hostfile", MVAPICH_TMP_HOSTFILE]
        found += self._launcher_args()
        for name, value in self._meeting(active_resources).items():
            found += ["-env", f"{name}={value}"]
        return [*found, *self._script()]


class SlurmRunner(_Mpi):
    """``srun``. It cannot be told which slots of a host to use. On its command line a comma ends a value: variables
    that have one are put into the environment that it is started with."""

    tool = "sinfo"

    def validate_args(self) -> None:
        for option in ("include", "exclude"):
            if ":" in getattr(self.args, option):
                raise ValueError(f"srun knows no slots; --{option} cannot name specific device ids, only hosts.")

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Pool) -> list[str]:
        ranks, each = self._even(active_resources)
        found = ["srun", "-n", str(ranks), *self._launcher_args()]
        if self.args.include or self.args.exclude or self.args.num_nodes > 0:
            found += ["--nodes", str(len(active_resources))]
        if self.args.include or self.args.exclude:
            found += ["--nodelist", ",".join(active_resources)]
        if self.args.num_gpus > 0:
            found += ["--gpus-per-node", str(each)]
        exports = []
        for name, value in self._meeting(active_resources).items():
            if "," in value:  # srun would end the value there; ALL takes it from here
                environment[name] = value
            else:
                exports.append(f"{name}={value}")
        return [*found, "--export", ",".join(["ALL", *exports]), *self._script()]


RUNNERS: Mapping[str, type[_Mpi]] = {
    "openmpi": OpenMPIRunner, "mpich": MPICHRunner, "impi": IMPIRunner, "mvapich": MVAPICHRunner, "slurm": SlurmRunner,
}  # fmt: skip
"""By what ``--launcher`` calls them; "pdsh" is zoo's own launcher over ssh."""


def command(name: str, args: Namespace, pool: Pool, environment: MutableMapping[str, str], exports: Mapping[str, str],
            world_info: str) -> Sequence[str]:  # fmt: skip
    """What starts the job with this launcher.

    Raises:
        ValueError: there is no such launcher, or its program is not here.
    """
    if name not in RUNNERS:
        raise ValueError(f"--launcher {name!r} is none of pdsh, {', '.join(RUNNERS)}.")
    runner = RUNNERS[name](args, world_info, pool)
    if not runner.backend_exists():
        raise ValueError(f"--launcher {name} needs the program {runner.tool}, which is not on the PATH; install it.")
    for key, value in exports.items():
        runner.add_export(key, value)
    found: list[str] = runner.get_cmd(environment, pool)
    return found
