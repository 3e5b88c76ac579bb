"""``deepspeed.launcher.runner``: the constants, the file of hosts, filters and arguments that programs read before a
launcher starts anything. torchrun is what starts processes here; :func:`main` says how."""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shlex
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from zoo.comm.launch import PORT
from zoo.deepspeed.adapters.utilities.logs import logger

DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
EXCLUDE_ENVS = {"AISC_JOB_NAME": ["NCCL_IB_HCA", "UCX_NET_DEVICES"]}
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER, IMPI_LAUNCHER = "pdsh", "openmpi", "mpich", "impi"
SLURM_LAUNCHER, MVAPICH_LAUNCHER = "slurm", "mvapich"
PDSH_MAX_FAN_OUT = 1024
MVAPICH_TMP_HOSTFILE = "/tmp/deepspeed_mvapich_hostfile"

_LINE = re.compile(r"(\S+)\s+slots=(\d+)(?:\s.*)?")
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
        ValueError: see :func:`_parse_hostfile`.
    """
    if not os.path.isfile(hostfile_path):
        logger.warning("there is no file of hosts %s: training is on this host only.", hostfile_path)
        return None
    with open(hostfile_path, encoding="utf-8") as lines:
        return _parse_hostfile(lines)


def _parse_hostfile(hostfile_lines: Iterable[str]) -> OrderedDict[str, int]:
    """Host → slots. Empty lines and those that begin with # say nothing.

    Raises:
        ValueError: a line that is not "host slots=n", a host that comes twice, or no host at all.
    """
    found: OrderedDict[str, int] = OrderedDict()
    for line in (line.strip() for line in hostfile_lines):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f'a file of hosts has the line {line!r}; a line is "host slots=n", as worker-0 slots=4.')
        host, slots = match.groups()
        if host in found:
            raise ValueError(f"a file of hosts has {host!r} twice; write its slots in one line.")
        found[host] = int(slots)
    if not found:
        raise ValueError('a file of hosts has no hosts; a line is "host slots=n", as worker-0 slots=4.')
    return found


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """ "host:0,2" → ("host", [0, 2]); "host" → ("host", []), which means all of its slots.

    Raises:
        ValueError: it is written otherwise.
    """
    host, colon, slots = node_config.partition(":")
    numbers = slots.split(",") if colon else []
    if not host or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"{node_config!r} does not name a host and its slots; write host, or host:0,2.")
    return host, [int(number) for number in numbers]


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """ "a:0@b@a:2" → {"a": [0, 2], "b": []}."""
    found: dict[str, set[int]] = {}
    for one in node_config_list.split("@"):
        host, slots = parse_node_config(one)
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Mapping[str, Sequence[int]]:
    """Host → slots of ``host_info`` that one of the filters leaves, in its order; hosts without slots are left out.

    Raises:
        ValueError: both filters, or a host or slot that is not there.
    """
    if include_str and exclude_str:
        raise ValueError(
            f"include {include_str!r} and exclude {exclude_str!r} are both given; say what to use, or what not to use."
        )
    if not include_str and not exclude_str:
        return host_info
    named = parse_node_config_list(include_str or exclude_str)
    for host, slots in named.items():
        if host not in host_info:
            raise ValueError(f"host {host!r} is not in the file of hosts, which has {', '.join(host_info) or 'none'}.")
        for slot in slots:
            if slot not in host_info[host]:
                raise ValueError(f"host {host!r} has no slot {slot}; it has {list(host_info[host])}.")
    left: OrderedDict[str, list[int]] = OrderedDict()
    for host, all_slots in host_info.items():
        chosen = (named[host] or list(all_slots)) if host in named else []
        slots = chosen if include_str else [slot for slot in all_slots if slot not in chosen]
        if slots:
            left[host] = list(slots)
    return left


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> Mapping[str, Sequence[int]]:
    """:func:`parse_resource_filter` of what :func:`fetch_hostfile` read: host → numbers of its slots."""
    hosts = OrderedDict((host, list(range(slots))) for host, slots in resource_pool.items())
    return parse_resource_filter(hosts, inclusion, exclusion)


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, Sequence[int]], num_nodes: int, num_gpus: int
) -> Mapping[str, Sequence[int]]:
    """The first ``num_nodes`` hosts, and ``num_gpus`` slots of each; numbers below 1 change nothing."""
    hosts = list(active_resources)[: num_nodes if num_nodes > 0 else None]
    return OrderedDict(
        (host, list(range(num_gpus)) if num_gpus > 0 else list(active_resources[host])) for host in hosts
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
    hosts: Mapping[str, Sequence[int]] = {}
    if pool is not None:
        hosts = parse_inclusion_exclusion(pool, given.include, given.exclude)
        hosts = apply_num_nodes_and_gpus(hosts, given.num_nodes, given.num_gpus)
    processes = str(len(next(iter(hosts.values())))) if hosts else str(given.num_gpus) if given.num_gpus > 0 else "auto"
    command = ["torchrun", "--nproc-per-node", processes]
    if len(hosts) > 1 or given.num_nodes > 1:
        address = given.master_addr or next(iter(hosts), "the-first-host")
        command += ["--nnodes", str(len(hosts) or given.num_nodes), "--node-rank", "<of this host>"]
        command += ["--master-addr", address]
    if given.master_port != PORT or len(hosts) > 1:
        command += ["--master-port", str(given.master_port)]
    command += ["--no-python"] * given.no_python + ["-m"] * given.module + [given.user_script, *given.user_args]
    raise NotImplementedError(
        "deepspeed.launcher starts no processes in zoo: torchrun does, on every machine. This job is: "
        + " ".join(part if part.startswith("<") else shlex.quote(part) for part in command)
    )
