"""The machine under a rank: threads and memory."""

from __future__ import annotations

import os
import resource
import sys

import torch


def set_threads(wanted: int | None) -> int:
    """Give torch ``wanted`` threads, or this rank's share of the cores, at least one; returns how many."""
    if wanted is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(wanted)
    return wanted


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; its peak where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return peak_bytes()


def peak_bytes() -> int:
    """The most memory of this process that was in RAM at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
