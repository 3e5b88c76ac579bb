"""What a batch system or a launcher has allotted: SLURM, PBS and what MPI is given, plain variables."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zoo.launch.hosts import is_number

_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
_MOST = 100_000
"""Nodes of a list; more are a slip of the pen."""
_GROUP = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True)
class Allotment:
    """The hosts that a batch system lends to this job."""

    system: str
    hosts: Mapping[str, int]
    """Host → number of processes that may run there."""


@dataclass(frozen=True)
class Node:
    """Which node of a job this process is, where every node's launcher is started by something else."""

    system: str
    rank: int
    num_nodes: int
    address: str | None
    """Of the node of rank 0; None where nobody tells."""


def allotment(variables: Mapping[str, str]) -> Allotment | None:
    """What SLURM (``SLURM_JOB_NODELIST``) or PBS (``PBS_NODEFILE``, one line a process) has lent; None without either.

    Raises:
        ValueError: a variable, or the file, cannot be read.
    """
    nodes = variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST")
    if nodes:
        hosts = expand_nodes(nodes)
        return Allotment("SLURM", dict(zip(hosts, _slurm_slots(variables, hosts), strict=True)))
    file = variables.get("PBS_NODEFILE")
    if file:
        try:
            lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
        except FileNotFoundError:
            raise ValueError(
                f"PBS_NODEFILE names {file!r}, which is not there; unset it, or give --hostfile."
            ) from None
        if not lines:
            raise ValueError(f"PBS_NODEFILE names {file!r}, which has no hosts; give --hostfile.")
        return Allotment("PBS", {host: lines.count(host) for host in dict.fromkeys(lines)})
    return None


def _slurm_slots(variables: Mapping[str, str], hosts: list[str]) -> list[int]:
    """Processes a node: tasks if the job asked for some, else its GPUs, else one."""
    per_node = variables.get("SLURM_NTASKS_PER_NODE") or variables.get("SLURM_GPUS_ON_NODE")
    if per_node:
        return [_whole(per_node, "SLURM_NTASKS_PER_NODE or SLURM_GPUS_ON_NODE")] * len(hosts)
    tasks = variables.get("SLURM_TASKS_PER_NODE")
    if not tasks:
        return [1] * len(hosts)
    found = expand_counts(tasks)
    if len(found) != len(hosts):
        raise ValueError(
            f"SLURM_TASKS_PER_NODE={tasks!r} is about {len(found)} nodes, and the job has {len(hosts)}: "
            f"{', '.join(hosts)}; give --hostfile."
        )
    return found


def _whole(text: str, name: str) -> int:
    if not (is_number(text) and int(text) > 0):
        raise ValueError(f"the environment has {name}={text!r}; a whole number from 1 on belongs there.")
    return int(text)


def expand_counts(text: str) -> list[int]:
    """``"4(x2),3"`` → ``[4, 4, 3]``, as SLURM writes how many tasks each node has.

    Raises:
        ValueError: it is written otherwise.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is no list of tasks as SLURM writes it, such as 4(x2),3.")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def expand_nodes(text: str) -> list[str]:
    """``"a[03-05,7],b1"`` → ``["a03", "a04", "a05", "a7", "b1"]``, as SLURM writes a list of nodes. Several groups in
    a name are all pairs, the last one fastest.

    Raises:
        ValueError: it is written otherwise, names a node twice, or more than 100,000.
    """
    found: list[str] = []
    for name in re.split(r",(?![^\[]*\])", text):
        pieces = _GROUP.split(name.strip())  # what is between the groups, and what is in them, by turns
        if not name.strip() or any(sign in "".join(pieces[::2]) for sign in "[]"):
            raise ValueError(f"{text!r} is no list of nodes as SLURM writes it, such as a[03-05,7],b1.")
        choices = [_range(piece, text) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        if len(found) + math.prod(map(len, choices)) > _MOST:
            raise ValueError(_too_many(text))
        found += ["".join(parts) for parts in itertools.product(*choices)]
    if twice := [host for host, times in Counter(found).items() if times > 1]:
        raise ValueError(f"{text!r} names the node {twice[0]!r} twice.")
    return found


def _too_many(text: str) -> str:
    return f"{text!r} names more than {_MOST} nodes; give --hostfile."


def _range(text: str, whole: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not is_number(low) or (dash and not (is_number(high) and int(high) >= int(low))):
            raise ValueError(f"{whole!r} is no list of nodes as SLURM writes it: [{text}] should be such as [03-05,7].")
        if int(high or low) - int(low) >= _MOST:
            raise ValueError(_too_many(whole))
        found += [f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
    return found


_PLACES: tuple[tuple[str, str, str, str], ...] = (
    ("plain variables", "NODE_RANK", "NNODES", "MASTER_ADDR"),
    ("SLURM", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", ""),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MASTER_ADDR"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MASTER_ADDR"),
    ("an indexed Job of Kubernetes", "JOB_COMPLETION_INDEX", "NNODES", "MASTER_ADDR"),
)


def node(variables: Mapping[str, str]) -> Node | None:
    """Which node this is, where srun, mpirun (one process a node), Kubernetes or a person starts a launcher on each.

    Raises:
        ValueError: a variable is no number, or the rank is not below the number of nodes.
    """
    for system, rank, size, address in _PLACES:
        if rank in variables and size in variables:
            if not is_number(variables[rank]):
                raise ValueError(f"the environment has {rank}={variables[rank]!r}; a number belongs there.")
            nodes, number = _whole(variables[size], size), int(variables[rank])
            if number >= nodes:
                raise ValueError(f"the environment has {rank}={number} and {size}={nodes}; ranks are 0 to {nodes - 1}.")
            head = variables.get(address) if address else None
            names = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
            if system == "SLURM" and names:
                head = variables.get("MASTER_ADDR") or expand_nodes(names)[0]
            return Node(system, number, nodes, head)
    return None
