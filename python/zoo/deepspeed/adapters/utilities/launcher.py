"""``deepspeed.launcher.runner``: the constants, the file of hosts, filters and arguments that programs read before a
launcher starts anything. torchrun is what starts processes here; :func:`main` says how."""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from zoo.comm.launch import PORT
from zoo.deepspeed.adapters.utilities.logs import logger
from zoo.launch import hosts
from zoo.launch.exports import ENVIRONMENT_FILE, PREFIXES

DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = list(PREFIXES)
EXCLUDE_ENVS = {"AISC_JOB_NAME": ["NCCL_IB_HCA", "UCX_NET_DEVICES"]}
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER, IMPI_LAUNCHER = "pdsh", "openmpi", "mpich", "impi"
SLURM_LAUNCHER, MVAPICH_LAUNCHER = "slurm", "mvapich"
PDSH_MAX_FAN_OUT = 1024
MVAPICH_TMP_HOSTFILE = "/tmp/deepspeed_mvapich_hostfile"

_VALUES: Mapping[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "hostfile": (("-H",), {"default": DLTS_HOSTFILE, "help": "hosts, one a line: worker-0 slots=4"}),
    "include": (("-i",), {"default": "", "help": "only these: host[:slot,slot][@host...]"}),
    "exclude": (("-e",), {"default": "", "help": "all but these, written as for --include"}),
    "num_nodes": ((), {"type": int, "default": -1, "help": "the first hosts of the file; -1: all"}),
    "num_gpus": ((), {"type": int, "default": -1, "help": "processes on each host; -1: one for each slot"}),
    "master_port": ((), {"type": int, "default": PORT, "help": "port of rank 0"}),
    "master_addr": ((), {"default": "", "help": "address of the host of rank 0"}),
    "node_rank": ((), {"type": int, "default": -1, "help": "of this host, for --no_ssh"}),
    "launcher": ((), {"default": PDSH_LAUNCHER, "help": "what starts processes on other hosts"}),
    "launcher_args": ((), {"default": "", "help": "passed on to it"}),
    "enable_each_rank_log": ((), {"default": "None", "help": "folder with one log for each rank"}),
    "autotuning": ((), {"default": "", "choices": ["tune", "run"], "help": "look for a configuration first"}),
    "bind_core_list": ((), {"default": None, "help": "cores to share out: 0-3,8"}),
    "ssh_port": ((), {"type": int, "default": None, "help": "port of ssh"}),
    "venv_script": ((), {"default": None, "help": "script that activates the environment"}),
    "log_level": (
        (), {"default": "info", "choices": ["debug", "info", "warning", "error", "critical"], "help": "of the runner"},
    ),
}  # fmt: skip
_SWITCHES = {
    "module": "the script is a module, as for python -m",
    "no_python": "the script is run without python before it",
    "no_local_rank": "the script gets no --local_rank",
    "no_ssh": "every host is started by itself",
    "no_ssh_check": "do not try ssh first",
    "force_multi": "as on several hosts, also on one",
    "save_pid": "write the launcher's process id into a file",
    "bind_cores_to_rank": "each rank has cores of its own",
}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command ``deepspeed``: its options, ``user_script``, and ``user_args`` after it."""
    parser = argparse.ArgumentParser(prog="deepspeed", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, (short, how) in _VALUES.items():
        also = ("--num_accelerators",) if name == "num_gpus" else ()
        parser.add_argument(*short, f"--{name}", *also, dest=name, **how)
    for name, text in _SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("-q", "--quiet", action="store_true", help="as --log_level error")
    parser.add_argument("user_script", help="the script to start")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="what it is given")
    return parser.parse_args(args)


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Host → slots, as a file of hosts says, in its order; None, with a warning, where there is no such file.

    Raises:
        ValueError: see :func:`zoo.launch.hosts.parse_hostfile`.
    """
    if not os.path.isfile(hostfile_path):
        logger.warning("there is no file of hosts %s: training is on this host only.", hostfile_path)
        return None
    return OrderedDict(hosts.read_hostfile(hostfile_path))


def _parse_hostfile(hostfile_lines: Iterable[str]) -> OrderedDict[str, int]:
    """:func:`zoo.launch.hosts.parse_hostfile`."""
    return OrderedDict(hosts.parse_hostfile(hostfile_lines))


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """:func:`zoo.launch.hosts.parse_host`."""
    return hosts.parse_host(node_config)


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """:func:`zoo.launch.hosts.parse_filter`."""
    return hosts.parse_filter(node_config_list)


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Mapping[str, Sequence[int]]:
    """:func:`zoo.launch.hosts.select`."""
    return hosts.select(host_info, include_str, exclude_str)


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> Mapping[str, Sequence[int]]:
    """:func:`parse_resource_filter` of what :func:`fetch_hostfile` read: host → numbers of its slots."""
    return hosts.select(hosts.all_slots(resource_pool), inclusion, exclusion)


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, Sequence[int]], num_nodes: int, num_gpus: int
) -> Mapping[str, Sequence[int]]:
    """The first ``num_nodes`` hosts, and ``num_gpus`` slots of each; numbers below 1 change nothing."""
    chosen = list(active_resources)[: num_nodes if num_nodes > 0 else None]
    return OrderedDict(
        (host, list(range(num_gpus)) if num_gpus > 0 else list(active_resources[host])) for host in chosen
    )


def encode_world_info(world_info: Any) -> str:
    """URL-safe base64 of its JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Refused, with the command of torchrun that starts the same processes.

    Raises:
        ValueError: arguments that contradict each other, or hosts that are not there.
        NotImplementedError: always, after that.
    """
    given = parse_args(args)
    if (given.num_nodes >= 0 or given.num_gpus >= 0) and (given.include or given.exclude):
        raise ValueError(
            "--num_nodes or --num_gpus and --include or --exclude are both given; say numbers, or names of hosts."
        )
    pool = fetch_hostfile(given.hostfile)
    there: Mapping[str, Sequence[int]] = {}
    if pool is not None:
        there = parse_inclusion_exclusion(pool, given.include, given.exclude)
        there = apply_num_nodes_and_gpus(there, given.num_nodes, given.num_gpus)
    processes = str(len(next(iter(there.values())))) if there else str(given.num_gpus) if given.num_gpus > 0 else "auto"
    command = ["torchrun", "--nproc-per-node", processes]
    if len(there) > 1 or given.num_nodes > 1:
        address = given.master_addr or next(iter(there), "the-first-host")
        command += ["--nnodes", str(len(there) or given.num_nodes), "--node-rank", "<of this host>"]
        command += ["--master-addr", address]
    if given.master_port != PORT or len(there) > 1:
        command += ["--master-port", str(given.master_port)]
    command += ["--no-python"] * given.no_python + ["-m"] * given.module + [given.user_script, *given.user_args]
    raise NotImplementedError(
        "deepspeed.launcher starts no processes in zoo: torchrun does, on every machine. This job is: "
        + " ".join(part if part.startswith("<") else shlex.quote(part) for part in command)
    )
