"""Files with which a batch system starts a job: one launcher on each node, which takes its place from variables."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 15
"""What a launcher may need after the grace of its ranks, until it has told of their end."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What is to run on every node.

    Raises:
        ValueError: numbers or a name that cannot be.
    """

    name: str
    """Of the job: lower-case letters, digits and dashes."""
    nodes: int
    ranks: int
    """On each node; as many GPUs where ``gpus``."""
    command: Sequence[str]
    """Options of ``zoo launch``, SCRIPT and its arguments."""
    gpus: bool = True
    port: int = 29500
    grace_s: float = 6.0
    """From the signal that ends ranks to SIGKILL, in seconds."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks < 1:
            raise ValueError(
                f"a job of {self.nodes} nodes with {self.ranks} ranks each is none; give 1 or more of both."
            )
        if self.grace_s < 0:
            raise ValueError(f"grace_s is {self.grace_s:g}; give 0 seconds or more.")
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"the name of a job is {self.name!r}; give lower-case letters, digits and dashes, 63 at most."
            )

    def launcher(self) -> list[str]:
        """The command of each node."""
        return ["zoo", "launch", f"--ranks={self.ranks}", f"--grace-s={self.grace_s}", *self.command]


def name_of(text: str) -> str:
    """A job's name out of a file's: ``"My run.2"`` → ``"my-run-2"``, ``"2"`` → ``"job-2"``."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (name if name[:1].isalpha() else f"job-{name}")[:63].strip("-")


def sbatch(batch: Batch) -> str:
    """A script for ``sbatch``: srun starts a launcher on every node, and ends all where one fails."""
    directives = {"job-name": batch.name, "nodes": batch.nodes, "ntasks-per-node": 1, "output": f"{batch.name}-%j.log"}
    if batch.gpus:
        directives["gpus-per-node"] = batch.ranks
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in directives.items()), ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in batch.environment.items()]
    lines += [
        'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        f"export MASTER_PORT={batch.port}",
        f"exec srun --kill-on-bad-exit=1 {shlex.join(batch.launcher())}",
    ]
    return "\n".join(lines) + "\n"


def kubernetes(batch: Batch, image: str) -> str:
    """An indexed Job, and the headless Service by which its pods find the one of rank 0, as YAML.

    Args:
        image: that has zoo and the script.
    """
    import yaml

    variables = {
        **batch.environment, "NNODES": str(batch.nodes), "MASTER_ADDR": f"{batch.name}-0.{batch.name}",
        "MASTER_PORT": str(batch.port),
    }  # fmt: skip
    container: dict[str, Any] = {
        "name": "ranks", "image": image, "command": batch.launcher(),
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }  # fmt: skip
    if batch.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": batch.ranks}}
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": batch.name},
        # Pods are found before they are ready: ranks wait for each other by themselves.
        "spec": {"clusterIP": "None", "selector": {"job-name": batch.name}, "publishNotReadyAddresses": True},
    }  # fmt: skip
    pod = {
        "subdomain": batch.name, "restartPolicy": "Never", "containers": [container],
        # Kubernetes' own time, 30 s unless more is asked for, goes on while ranks have theirs and their launcher ends.
        "terminationGracePeriodSeconds": max(30, math.ceil(batch.grace_s) + PATIENCE_S),
    }  # fmt: skip
    job = {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": batch.name},
        "spec": {
            "completionMode": "Indexed", "completions": batch.nodes, "parallelism": batch.nodes, "backoffLimit": 0,
            "template": {"spec": pod},
        },
    }  # fmt: skip
    found: str = yaml.safe_dump_all([service, job], sort_keys=False)
    return found


def hostfile(hosts: Mapping[str, int]) -> str:
    """A file of hosts, as :func:`zoo.launch.hosts.read_hostfile` reads it."""
    return "".join(f"{host} slots={slots}\n" for host, slots in hosts.items())
