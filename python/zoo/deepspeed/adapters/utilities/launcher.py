"""``deepspeed.launcher.runner``: the constants, the file of hosts, filters and arguments that programs read before a
launcher starts anything; and :func:`main`, the command ``deepspeed``, which starts it."""

from __future__ import annotations

import argparse
import base64
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from zoo.comm.launch import PORT
from zoo.deepspeed.adapters.utilities.logs import logger
from zoo.deepspeed.adapters.utilities.runners import command
from zoo.deepspeed.standin import installed_folder
from zoo.launch import hosts
from zoo.launch.exports import ENVIRONMENT_FILE, PREFIXES, exported
from zoo.launch.job import Job, gpus
from zoo.launch.supervisor import Supervisor

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
    """The command ``deepspeed``: starts the script on every slot and ends with its exit code.

    On one host, and on several with ``--launcher pdsh``, zoo's own launcher does (:mod:`zoo.launch`), over ssh; the
    others are given a command line of theirs.

    Args:
        args: of the command line; None: those of this process, at whose end an error is one sentence.

    Raises:
        ValueError: arguments that contradict each other, or hosts that are not there.
        NotImplementedError: ``--autotuning``, ``--venv_script``.
    """
    if args is None:
        from zoo.cli.failure import one_sentence

        with one_sentence(shared=True):
            _run(parse_args())
    _run(parse_args(args))


def _run(given: argparse.Namespace) -> NoReturn:
    if (given.num_nodes >= 0 or given.num_gpus >= 0) and (given.include or given.exclude):
        raise ValueError(
            "--num_nodes or --num_gpus and --include or --exclude are both given; say numbers, or names of hosts."
        )
    if given.autotuning:
        raise NotImplementedError("--autotuning is `zoo tune CONFIG`, which looks for a configuration of zoo train.")
    if given.venv_script is not None:
        raise NotImplementedError(
            "--venv_script is not in zoo: ranks run the Python that runs deepspeed, on each host."
        )
    pool = fetch_hostfile(given.hostfile)
    there = _slots(pool, given)
    exports = _exports(several=pool is not None)
    if given.save_pid:
        Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed").write_text(str(os.getpid()), encoding="utf-8")
    if pool is not None and given.launcher.lower() != PDSH_LAUNCHER and (len(there) > 1 or given.force_multi):
        environment = {**os.environ, **exports}
        words = command(given.launcher.lower(), given, there, environment, exports, encode_world_info(there))
        os.execvpe(words[0], list(words), environment)
    raise SystemExit(Supervisor(_job(given, there, exports, chosen=pool is not None)).run())


def _slots(pool: Mapping[str, int] | None, given: argparse.Namespace) -> Mapping[str, Sequence[int]]:
    if pool is None:
        devices = len(gpus(os.environ)) or max(given.num_gpus, 1)
        pool = {"localhost": devices}
    there = parse_inclusion_exclusion(pool, given.include, given.exclude)
    if not there:
        raise ValueError(f"--exclude {given.exclude!r} leaves no host of {', '.join(pool)}.")
    return apply_num_nodes_and_gpus(there, given.num_nodes if not given.no_ssh else -1, given.num_gpus)


def _exports(*, several: bool) -> dict[str, str]:
    files = [Path(folder, DEEPSPEED_ENVIRONMENT_NAME) for folder in DEEPSPEED_ENVIRONMENT_PATHS]
    here = os.environ if several else {}
    found = exported(here, prefixes=EXPORT_ENVS, without=EXCLUDE_ENVS, files=files)
    folder, path = str(installed_folder()), found.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {**found, "PYTHONPATH": os.pathsep.join([folder, *(part for part in path.split(os.pathsep) if part)])}


def _job(
    given: argparse.Namespace, there: Mapping[str, Sequence[int]], exports: Mapping[str, str], *, chosen: bool
) -> Job:  # fmt: skip
    kind = ["--no-python"] if given.no_python else ["-m"] if given.module else []
    more: dict[str, Any] = {}
    address = given.master_addr or None
    if given.no_ssh:
        nodes, node = given.num_nodes if given.num_nodes > 0 else len(there), max(given.node_rank, 0)
        if nodes > 1 or node > 0:
            more |= {"node": node, "nodes": nodes}
            address = address or (next(iter(there)) if chosen else None)
        there = {"localhost": _slots_of_node(there, node)}
    if given.ssh_port is not None:
        more["ssh"] = f"{Job.ssh} -p {given.ssh_port}"
    alone = len(there) == 1 and "nodes" not in more
    cores = given.bind_core_list or ("all" if given.bind_cores_to_rank else None)
    return Job(
        command=[*kind, given.user_script, *given.user_args], hosts=there, environment=exports,
        devices=chosen or bool(given.include or given.exclude), address=address,
        port=None if alone and given.master_port == PORT else given.master_port, cores=cores,
        log_dir=None if given.enable_each_rank_log in (None, "None") else os.path.abspath(given.enable_each_rank_log),
        shown=(0,) if sum(map(len, there.values())) == 1 else None,
        local_rank=not given.no_local_rank and not given.no_python, **more,
    )  # fmt: skip


def _slots_of_node(there: Mapping[str, Sequence[int]], node: int) -> Sequence[int]:
    """Of the host on which this is, one of those that all start their own ranks."""
    slots = list(there.values())
    if len({len(one) for one in slots}) > 1:
        raise ValueError(
            f"--no_ssh needs as many slots on every host, and there are {', '.join(f'{len(one)}' for one in slots)} on "
            f"{', '.join(there)}; give --num_gpus, or leave --no_ssh out."
        )
    return slots[min(node, len(slots) - 1)]
