"""A ``torch.distributed`` world for each simulated rank, beside the one the process may have.

``torch.distributed`` keeps its process groups in ``distributed_c10d._world``. During a run that name is bound to a
switch: in the thread of a rank it leads to the rank's own world, in all others to the world that was there before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from zoo.sim._guards import internal
from zoo.sim.scheduler import Rank, Scheduler

__all__ = ["Place", "installed", "place"]


class Place:
    """Where a thread is: which rank of which run, with which world."""

    def __init__(self, scheduler: Scheduler, rank: Rank) -> None:
        self.scheduler = scheduler
        self.rank = rank
        self.world = _new_world()


_local = threading.local()


def place() -> Place | None:
    """The rank that the current thread is, or None outside of the simulator."""
    found: Place | None = getattr(_local, "place", None)
    return found


def enter(where: Place | None) -> None:
    """Make the current thread that rank (None: no rank)."""
    _local.place = where


class _RankWorld:
    """Same attributes as torch's ``_World``, each empty at first."""


def _new_world() -> Any:
    c10d = dist.distributed_c10d
    cls = internal(c10d, "_World")
    template = cls()
    world = _RankWorld()
    for name, member in vars(cls).items():
        if not isinstance(member, property) or name == "pg_config_info":
            continue
        value = getattr(template, name)
        # default_pg is None or a group, the counters are ints, all the rest are dicts and lists
        setattr(world, name, type(value)() if isinstance(value, (dict, list, int)) else None)
    return world


class _Worlds:
    """The switch between the worlds of the ranks and the world that the process had before."""

    def __init__(self, before: Any) -> None:
        object.__setattr__(self, "_before", before)

    def _current(self) -> Any:
        where = place()
        return object.__getattribute__(self, "_before") if where is None else where.world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._current(), name, value)

    @property
    def pg_config_info(self) -> Any:
        return internal(dist.distributed_c10d, "_World").pg_config_info.fget(self)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Give each rank a world of its own for the time of the context, and put back what was there."""
    c10d = dist.distributed_c10d
    isolate = internal(internal(__import__("torch")._C, "_distributed_c10d"), "_set_thread_isolation_mode")
    before = internal(c10d, "_world")
    hook = sys.excepthook  # init_process_group wraps it once more each time
    saved = {name: getattr(c10d, name) for name in ("_backend", "_default_pg_init_method") if hasattr(c10d, name)}
    c10d._world = _Worlds(before)  # type: ignore[assignment]
    isolate(True)
    try:
        yield
    finally:
        isolate(False)
        c10d._world = before
        sys.excepthook = hook
        for name, value in saved.items():
            setattr(c10d, name, value)
