"""Joining the job that a launcher started."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE_S = 5.0
_THREADS = Path("/proc/self/task")
_leaves = False
HALF_AN_HOUR = timedelta(minutes=30)
PORT = 29500
"""Of rank 0, where nobody says another."""
_log = logging.getLogger("zoo.comm")


@dataclass(frozen=True)
class Place:
    """Where a process is in a job, as its launcher's variables say."""

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    """Both None where the launcher does not tell."""
    launcher: str
    address: str | None
    """Host of rank 0, None where the launcher does not tell."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta = HALF_AN_HOUR,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Mapping[str, Any] | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> tuple[int, int]:
    """Join the process group of the job, if there is one and it is not joined yet.

    Variables of torchrun (RANK, WORLD_SIZE) come first, then those of SLURM's ``srun``, then those of MPI launchers
    (Open MPI, MPICH and its relatives, MVAPICH2). What SLURM and MPI say is written into torchrun's variables, where
    other packages look for it.

    Args:
        dist_backend: "nccl", "gloo", …; by default nccl when CUDA is available, else gloo.
        auto_mpi_discovery: look for the variables of SLURM and MPI too.
        distributed_port: of rank 0, where the launcher names none.
        verbose: say in the log (INFO) what was joined.
        timeout: after this long without an answer from a peer an operation fails instead of waiting on.
        init_method: a URL as of ``torch.distributed``: "env://", "tcp://host:port", "file:///path". By default env://.
        dist_init_required: None: join if a launcher says that there are ranks. True: it has to be joined, and an error
            says what is missing. False: it is joined already, or there is one rank; several that nobody has joined are
            an error, because each would train alone.
        config: a configuration whose ``comm.timeout_s`` is the timeout.
        rank, world_size: by hand, as "tcp://" without a launcher needs them; -1: as the launcher says.

    Returns:
        (rank, world size); (0, 1) without a job.

    Raises:
        ValueError: arguments, or variables, that contradict each other or are not enough.
    """
    seconds = config.get("comm", {}).get("timeout_s") if config is not None else None
    timeout = timedelta(seconds=seconds) if seconds is not None else timeout
    if not isinstance(timeout, timedelta):
        raise ValueError(
            f"init_distributed got timeout={timeout!r}; give a datetime.timedelta, as timedelta(minutes=30)."
        )
    if not timeout > timedelta(0):
        raise ValueError(f"init_distributed got a timeout of {timeout}; it must be longer than nothing.")
    if not dist.is_initialized():
        place = _place(rank, world_size, auto_mpi_discovery)
        if dist_init_required is False:
            _refuse_ranks_alone(place)
        elif place is not None:
            _join(place, dist_backend, init_method, distributed_port, timeout)
            if verbose:
                _log.info("rank %d of %d (%s) joined over %s", *_ranks(), place.launcher, dist.get_backend())
        elif dist_init_required:
            raise ValueError(
                "dist_init_required=True, and no launcher has set RANK and WORLD_SIZE; start the script with torchrun, "
                "srun or mpirun, or give rank=, world_size= and init_method='tcp://host:port'."
            )
        elif init_method is not None:
            raise ValueError(f"init_method={init_method!r} without a launcher needs rank= and world_size= as well.")
    return _ranks()


def local_device() -> torch.device:
    """Where this process computes: its current GPU, which :func:`init_distributed` has chosen (a program that joins by
    itself calls ``torch.cuda.set_device``); the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def join_alone() -> None:
    """A process group of this process only, where no launcher has started others and none is joined: what calls
    ``torch.distributed`` itself then works as in a job of one rank. Where it cannot be made, a warning says why.
    """
    if dist.is_initialized() or discover(os.environ) is not None:
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    except RuntimeError as error:
        _log.warning("one process without a launcher gets no process group of its own: %s", error)
        return
    leave_at_exit()


def _refuse_ranks_alone(place: Place | None) -> None:
    if place is not None and place.world_size > 1:
        raise ValueError(
            f"dist_init_required=False says that the ranks are joined already, but nobody has joined the "
            f"{place.world_size} ranks of this job ({place.launcher}): each would train alone. Call "
            "torch.distributed.init_process_group() before, or leave dist_init_required out."
        )


def _ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _place(rank: int, world_size: int, discovers: bool) -> Place | None:
    if (rank < 0) != (world_size < 0) or (rank >= 0 and not rank < world_size):
        raise ValueError(
            f"init_distributed got rank={rank}, world_size={world_size}; give both, 0 <= rank < world_size."
        )
    if rank >= 0:
        local = _number(os.environ, "LOCAL_RANK") if "LOCAL_RANK" in os.environ else None
        return Place(rank, world_size, local, None, "by hand", None)
    return discover(os.environ, others=discovers)


def discover(variables: Mapping[str, str], *, others: bool = True) -> Place | None:
    """What launchers have said; None where no one has started several ranks, or one as a job.

    Args:
        others: than torchrun.

    Raises:
        ValueError: a variable is no number.
    """
    kinds: list[tuple[str, tuple[str, str, str, str]]] = [
        ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    ]
    if others:
        kinds += [
            ("srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")),
            ("Open MPI", (
                "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
            )),
            ("MVAPICH2", (
                "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
            )),
            ("MPICH", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
        ]  # fmt: skip
    for launcher, (rank, size, local, local_size) in kinds:
        if rank in variables and size in variables:
            local_ranks = _number(variables, local_size) if local_size in variables else None
            ranks = _number(variables, size)
            return Place(
                _number(variables, rank), ranks, _number(variables, local) if local in variables else None, local_ranks,
                launcher, _address(variables, ranks, local_ranks),
            )  # fmt: skip
    return None


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ValueError(f"the environment has {name}={variables[name]!r}; a launcher sets a number there.") from None


def _address(variables: Mapping[str, str], ranks: int, local_ranks: int | None) -> str | None:
    if "MASTER_ADDR" in variables:
        return variables["MASTER_ADDR"]
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_node(nodes)
    return "127.0.0.1" if ranks == local_ranks else None


def first_node(nodes: str) -> str:
    """The first name of a list as SLURM writes it: ``"a[03-07,9],b1"`` → ``"a03"``."""
    found = re.match(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    if found is None:
        raise ValueError(f"SLURM's list of nodes, {nodes!r}, cannot be read; set MASTER_ADDR.")
    return f"{found[1]}{found[2] or ''}{found[3] or ''}"


def _join(place: Place, backend: str | None, init_method: str | None, port: int, timeout: timedelta) -> None:
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():  # whatever the backend: two may be one, and gloo carries tensors of GPUs too
        torch.cuda.set_device(_device_of(place, alone="nccl" in backend))
    _tell(place, init_method, port)
    dist.init_process_group(
        backend, init_method=init_method or "env://", timeout=timeout, rank=place.rank, world_size=place.world_size
    )
    leave_at_exit()


def _device_of(place: Place, *, alone: bool) -> int:
    """The GPU of a process. A launcher that shows each its own one has chosen already; where it does not tell the rank
    on this host, ranks are taken to lie host by host.

    Raises:
        ValueError: ranks that each need a GPU of their own (``alone``) are more than there are.
    """
    count = torch.cuda.device_count()
    local = place.local_rank if place.local_rank is not None else place.rank % count
    if local >= count > 1 and alone:
        raise ValueError(
            f"this process is rank {local} of its host ({place.launcher}) and sees {count} GPUs; ranks that talk over "
            f"nccl need one each. Start at most {count} on this host, or show each its own by CUDA_VISIBLE_DEVICES."
        )
    return local % count


def leave_at_exit() -> None:
    """Have this process leave its process group before Python ends, whoever has joined it: see :func:`_leave`. Once;
    later calls, and groups whose devices have no gloo or have nccl too, change nothing."""
    global _leaves
    if _leaves or not dist.is_initialized():
        return
    backends = str(dist.get_backend_config())
    if "gloo" in backends and not ("nccl" in backends and torch.cuda.is_available()):
        _leaves = True
        atexit.register(_leave)


def _leave() -> None:
    """Destroy all groups, then wait until the threads of gloo that are left sleep.

    A thread of gloo lets go of a collective's tensors after it has told that the collective is done. Where Python is
    ending by then, freeing the last reference aborts the process, after all its work (6 of 150 processes that ended
    right after a collective). ``destroy_process_group()`` ends no thread of a group that something still refers to: a
    subgroup in a module, a default argument in ``torch.distributed.nn``. What waits for ranks that do not come is left
    as it is after some seconds, and a program that has failed does not wait at all.
    """
    if dist.is_initialized() and getattr(sys, "last_type", None) is None:
        ending = threading.Thread(target=dist.destroy_process_group, name="zoo-leave", daemon=True)
        ending.start()
        ending.join(_PATIENCE_S)
        wait_until_asleep(_PATIENCE_S)


def wait_until_asleep(patience_s: float, prefix: str = "pt_gloo") -> bool:
    """Wait until no thread whose name begins with ``prefix`` has anything left to do: it slept at two looks, and was
    not woken between them. Such a thread waits for a collective, or in one; not for Python's lock, which nobody holds
    between the looks. False after ``patience_s`` seconds; True at once where the system does not list threads.
    """
    until, before = time.monotonic() + patience_s, None
    while (now := _threads(prefix)) is not None and now:
        if now == before and all(state == "S" for state, _ in now.values()):
            break
        if time.monotonic() > until:
            return False
        before = now
        time.sleep(0.001)
    return True


def _threads(prefix: str) -> dict[str, tuple[str, str]] | None:
    """State ("S": it sleeps) and number of switches of each thread; None where the system does not tell."""
    found = {}
    try:
        for folder in _THREADS.iterdir():
            try:
                lines = (folder / "status").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            said = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if said["Name"].startswith(prefix):
                found[folder.name] = (said["State"][:1], said.get("voluntary_ctxt_switches", ""))
    except (OSError, KeyError):
        return None
    return found


def speak_as_torchrun(port: int = PORT) -> None:
    """Set the variables that torchrun would (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...) from those of srun or MPI.

    For programs that ask for the number of ranks before they join. Those that are set stay; without a launcher, or
    under torchrun, nothing changes.

    Raises:
        ValueError: a variable is no number, or nobody tells where rank 0 is.
    """
    place = discover(os.environ)
    if place is not None and place.launcher != "torchrun":
        _tell(place, None, port)


def _tell(place: Place, init_method: str | None, port: int) -> None:
    if place.launcher not in ("torchrun", "by hand"):
        said: dict[str, int | None] = {"RANK": place.rank, "WORLD_SIZE": place.world_size}
        said |= {"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": place.local_world_size}
        for name, value in said.items():
            if value is not None:
                os.environ.setdefault(name, str(value))
        if init_method is None and place.address is None and "MASTER_ADDR" not in os.environ:
            raise ValueError(
                f"{place.launcher} started {place.world_size} ranks on several hosts and does not tell where rank 0 "
                "is; set MASTER_ADDR, such as `mpirun -x MASTER_ADDR=host0 ...`, or give init_method='tcp://host:port'."
            )
    if place.launcher != "torchrun" and init_method in (None, "env://"):
        os.environ.setdefault("MASTER_ADDR", place.address or "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(port))
