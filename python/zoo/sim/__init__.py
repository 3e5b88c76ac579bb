"""Simulated ranks: N ranks of ``torch.distributed`` as threads of one process, deterministic, with real values.

``run(world_size, fn)`` calls ``fn(rank)`` on every rank and returns the list of results. See the README beside this
file for what it guarantees.
"""

from __future__ import annotations

from zoo.sim.dry import dry
from zoo.sim.errors import (
    DeadlockError,
    DivergenceError,
    PeerLostError,
    RankError,
    SimTimeoutError,
    WaitTimeoutError,
)
from zoo.sim.faults import Crash, Delay, Fault
from zoo.sim.programs import Programs, compute
from zoo.sim.runner import defaults, run
from zoo.sim.trace import Event, Trace

__all__ = [
    "Crash",
    "DeadlockError",
    "Delay",
    "DivergenceError",
    "Event",
    "Fault",
    "PeerLostError",
    "Programs",
    "RankError",
    "SimTimeoutError",
    "Trace",
    "WaitTimeoutError",
    "compute",
    "defaults",
    "dry",
    "run",
]
