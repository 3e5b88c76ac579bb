"""SLURM on this host alone: munged, slurmctld and one slurmd a node, with all their files in one folder.

    python -m scripts.real.slurm up FOLDER [NODES]      then SLURM_CONF=FOLDER/slurm.conf srun …
    python -m scripts.real.slurm down FOLDER

Needs the packages slurm-wlm and munge. Jobs run as whoever starts it. Nodes are called zoo0, zoo1, … and have four
processors each, whatever this host has; where there is one it has this host's name, which can be looked up.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import sys
from pathlib import Path

from scripts.real import servers

PROGRAMS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm"}


def missing() -> str | None:
    """Why there can be none here; None: there can."""
    for program, package in PROGRAMS.items():
        if servers.find(program) is None:
            return f"{program} is not installed (Debian's package {package})"
    return None


def up(folder: Path, nodes: int = 1) -> dict[str, str]:
    """Start it. Returns the variables with which its commands find it.

    Raises:
        RuntimeError: it does not come up.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    os.chmod(folder, 0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir(exist_ok=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    socket_of_munge = folder / "munge.socket"
    servers.start(folder, "munged", [
        "--foreground", "--force", f"--key-file={key}", f"--socket={socket_of_munge}",
        f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
    ])  # fmt: skip
    servers.wait(socket_of_munge.exists, folder, "munged")
    (folder / "slurm.conf").write_text(_configuration(folder, nodes))
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    environment = {**os.environ, **variables}
    servers.start(folder, "slurmctld", ["-D", "-c"], environment)
    for name in names(nodes):
        servers.start(folder, "slurmd", ["-D", "-c", "-N", name], environment, called=f"slurmd-{name}")

    def idle() -> bool:
        if not servers.done("sinfo", environment=environment):
            return False
        return servers.do("sinfo", "-h", "-o", "%T", "-N", environment=environment).split() == ["idle"] * nodes

    servers.wait(idle, folder, "SLURM")
    return variables


def names(nodes: int) -> list[str]:
    """Of its nodes."""
    return [socket.gethostname()] if nodes == 1 else [f"zoo{number}" for number in range(nodes)]


def _configuration(folder: Path, nodes: int) -> str:
    user, here = "root" if os.geteuid() == 0 else str(os.geteuid()), socket.gethostname()
    first = random.SystemRandom().randrange(20_000, 32_000)
    lines = {
        "ClusterName": "zoo", "SlurmctldHost": f"{here}(127.0.0.1)", "SlurmUser": user, "SlurmdUser": user,
        "AuthType": "auth/munge", "AuthInfo": f"socket={folder}/munge.socket", "SlurmctldPort": first,
        "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "MpiDefault": "none",
        "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CPU", "ReturnToService": 2,
        "StateSaveLocation": f"{folder}/state", "SlurmdSpoolDir": f"{folder}/spool/%n",
        "SlurmctldPidFile": f"{folder}/slurmctld.pid", "SlurmdPidFile": f"{folder}/slurmd-%n.pid",
        "SlurmdParameters": "config_overrides", "KillWait": 5, "SwitchType": "switch/none",
        "AccountingStorageType": "accounting_storage/none", "JobAcctGatherType": "jobacct_gather/none",
    }  # fmt: skip
    text = "".join(f"{name}={value}\n" for name, value in lines.items())
    for place, name in enumerate(names(nodes)):
        text += f"NodeName={name} NodeHostname={here} NodeAddr=127.0.0.1 Port={first + 1 + place} CPUs=4\n"
    return text + "PartitionName=all Nodes=ALL Default=YES State=UP\n"


def down(folder: Path) -> None:
    """End it."""
    servers.stop(folder)


if __name__ == "__main__":
    if len(sys.argv) in (3, 4) and sys.argv[1] == "up":
        up(Path(sys.argv[2]).absolute(), *map(int, sys.argv[3:]))
    elif len(sys.argv) == 3 and sys.argv[1] == "down":
        down(Path(sys.argv[2]).absolute())
    else:
        sys.exit(str(__doc__))
