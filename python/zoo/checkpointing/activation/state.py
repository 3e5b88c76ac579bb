"""What ``configure`` and ``model_parallel_cuda_manual_seed`` have set: the only module state of this package.

What the main thread sets holds for every thread that has nothing of its own (autograd's among them); what another
thread sets holds for that thread, so that simulated ranks (``zoo.sim``) are as apart as processes are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zoo.checkpointing.activation.rng import CudaRNGStatesTracker

if TYPE_CHECKING:
    from zoo.checkpointing.activation.recomputing import ActivationCheckpointing

__all__ = ["State", "current", "entered", "own"]


class State:
    """Of a process, or of a thread that has its own.

    Attributes:
        checkpointing: what ``configure`` made.
        plain: what works without it.
        rank: of this process among the tensor-parallel ranks.
        tracker: what ``get_cuda_rng_tracker`` returns.
    """

    def __init__(self) -> None:
        self.checkpointing: ActivationCheckpointing | None = None
        self.plain: ActivationCheckpointing | None = None
        self.rank = 0
        self.tracker = CudaRNGStatesTracker()


class _Local(threading.local):
    state: State | None = None


_process, _local = State(), _Local()


def current() -> State:
    """That of this thread, else of the process."""
    return _local.state or _process


def own() -> State:
    """The one to change from this thread."""
    if threading.current_thread() is threading.main_thread():
        return current()
    if _local.state is None:
        _local.state = State()
    return _local.state


@contextlib.contextmanager
def entered(state: State) -> Iterator[None]:
    """Within the context this thread has the state of another one, for which it computes."""
    before, _local.state = _local.state, state
    try:
        yield
    finally:
        _local.state = before
