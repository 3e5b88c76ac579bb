"""Joining the job that a launcher started."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def init_distributed(*, backend: str | None = None, timeout_s: float = 300.0) -> tuple[int, int]:
    """Join the process group that torchrun's environment describes, if there is one and it is not joined yet.

    Args:
        backend: "nccl", "gloo", …; by default nccl when CUDA is available, else gloo.
        timeout_s: after this long without an answer from a peer an operation fails instead of waiting on.

    Returns:
        (rank, world size); (0, 1) when no launcher set RANK and WORLD_SIZE.
    """
    if timeout_s <= 0:
        raise ValueError(f"init_distributed got timeout_s={timeout_s}; it must be a positive number of seconds.")
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return 0, 1
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()
