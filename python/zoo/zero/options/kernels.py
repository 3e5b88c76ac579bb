"""Whether the ranks of a job can use compiled kernels: settled once, before the first step needs it.

A rank without them would compute the same numbers in plain torch, but every step of the job would last as long as its
own, and where it must not (``ZOO_KERNELS=native``) it would fail in the middle of a step that other ranks wait in.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zoo.comm import CollectiveMismatchError, Communicator

_log = logging.getLogger("zoo.zero")


@dataclass(frozen=True, kw_only=True)
class State:
    """Of one rank: whether it can use compiled kernels, why not, and whether it must (``ZOO_KERNELS=native``)."""

    usable: bool
    why: str = ""
    required: bool = False


def state(device: torch.device) -> State:
    """That of this process, for tensors on ``device``; builds and loads the library.

    Raises:
        ValueError: ``ZOO_KERNELS`` is something else than auto, native or reference.
    """
    try:
        from zoo.kernels import loading
        from zoo.kernels.building import BuildError
    except ImportError:
        return State(usable=False, why="zoo-kernels is not installed")
    required = loading.mode() == "native"
    try:
        usable = loading.native_cuda() if device.type == "cuda" else loading.native()
    except BuildError as error:
        return State(usable=False, why=str(error), required=True)
    if usable:
        return State(usable=True, required=required)
    why = loading.why_not() or (loading.why_not_cuda() if device.type == "cuda" else None)
    return State(usable=False, why="ZOO_KERNELS=reference" if loading.mode() == "reference" else why or "")


def agree_on_kernels(comm: Communicator, device: torch.device) -> None:
    """Where some ranks cannot use compiled kernels none does: one all-gather of 8 bytes. Says so on the first rank.

    Raises:
        BuildError: some ranks cannot, and ``ZOO_KERNELS=native`` on some rank; on all ranks, with the reasons.
    """
    if device.type not in ("cpu", "cuda") or comm.backend == "dry" or comm.size == 1:
        return
    mine = state(device)
    try:
        comm.agree("compiled kernels:", "usable" if mine.usable else f"lacking, required: {mine.required}", device)
        if mine.usable or not mine.required:
            return
    except CollectiveMismatchError:
        pass  # on all ranks
    everyone = [mine] * comm.size
    dist.all_gather_object(everyone, mine, group=comm.group)  # not by the communicator, whose check would count it
    _settle(everyone, first=comm.rank == 0)


def _settle(everyone: list[State], *, first: bool) -> None:
    from zoo.kernels import loading
    from zoo.kernels.building import BuildError

    why = "; ".join(f"rank {rank}: {each.why}" for rank, each in enumerate(everyone) if not each.usable)
    demanding = [str(rank) for rank, each in enumerate(everyone) if each.required]
    if demanding:
        raise BuildError(
            f"ZOO_KERNELS=native on rank{'s' * (len(demanding) > 1)} {', '.join(demanding)}, and some ranks cannot use "
            f"compiled kernels; repair that, or start all ranks with ZOO_KERNELS=auto: {why}"
        )
    loading.set_mode("reference")
    if first:
        _log.warning(
            "all ranks run the references in plain torch, which are slower, because some cannot use compiled kernels: "
            "%s",
            why,
        )
